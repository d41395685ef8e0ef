//! Of the kernel's description of its types (Documentation/bpf/btf.rst), the little that a program needs to find its
//! way: the number of a function, and where a structure has its members. (The crates that read it keep the members
//! to themselves; libbpf takes a C compiler.)

/// Where the kernel shows it.
pub(super) const KERNEL: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;

/// How deep structures without a name may lie in each other.
const DEPTH: u32 = 8;

/// The types.
pub(super) struct Types<'a> {
    strings: &'a [u8],
    /// Type N is at N - 1.
    types: Vec<Type<'a>>,
}

struct Type<'a> {
    name: u32,
    kind: u32,
    /// Whether members have the size of a bit field beside their offset.
    has_sizes: bool,
    /// Of a structure or union.
    members: &'a [u8],
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl<'a> Types<'a> {
    /// None if it is no such description, or has a kind of type that is not known.
    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        if bytes.get(..2)? != MAGIC.to_le_bytes() {
            return None;
        }
        let header = index(word(bytes, 4)?);
        let section = |at| {
            let start = header.checked_add(index(word(bytes, at)?))?;
            bytes.get(start..start.checked_add(index(word(bytes, at + 4)?))?)
        };
        let (mut rest, strings) = (section(8)?, section(16)?);
        let mut types = Vec::new();
        while !rest.is_empty() {
            let (name, info) = (word(rest, 0)?, word(rest, 4)?);
            let (kind, count) = (info >> 24 & 0x1f, index(info & 0xffff));
            let length = match kind {
                // Pointers, forward declarations, other names, const, volatile, restrict, functions, floats, tags.
                2 | 7..=11 | FUNCTION | 16 | 18 => 0,
                // Integers, variables, tags of declarations.
                1 | 14 | 17 => 4,
                // Arrays.
                3 => 12,
                STRUCT | UNION => 12 * count,
                // Enumerations, also those of 64 bits.
                6 => 8 * count,
                19 => 12 * count,
                // Prototypes of functions, and sections.
                13 => 8 * count,
                15 => 12 * count,
                _ => return None,
            };
            let end = 12 + length;
            let members = if matches!(kind, STRUCT | UNION) { rest.get(12..end)? } else { &[] };
            types.push(Type { name, kind, has_sizes: info >> 31 != 0, members });
            rest = rest.get(end..)?;
        }
        Some(Self { strings, types })
    }

    fn is_named(&self, name: u32, wanted: &str) -> bool {
        let text = self.strings.get(index(name)..).unwrap_or_default();
        text.strip_prefix(wanted.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }

    /// The number of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        let at = self.types.iter().position(|of| of.kind == FUNCTION && self.is_named(of.name, name))?;
        u32::try_from(at + 1).ok()
    }

    /// Where a structure has a member, also one of a structure or union without a name in it; bytes.
    pub(super) fn offset(&self, structure: &str, member: &str) -> Option<u32> {
        let of = self.types.iter().find(|of| of.kind == STRUCT && self.is_named(of.name, structure))?;
        self.offset_in(of, member, DEPTH)
    }

    fn offset_in(&self, of: &Type<'a>, wanted: &str, depth: u32) -> Option<u32> {
        of.members.as_chunks::<12>().0.iter().find_map(|member| {
            let (name, number, place) = (word(member, 0)?, word(member, 4)?, word(member, 8)?);
            let bits = if of.has_sizes { place & 0xff_ffff } else { place };
            if self.is_named(name, wanted) {
                return (bits % 8 == 0).then_some(bits / 8);
            }
            let inner = self.types.get(index(number).checked_sub(1)?)?;
            let is_open = self.is_named(name, "") && matches!(inner.kind, STRUCT | UNION) && depth > 0;
            is_open.then(|| self.offset_in(inner, wanted, depth - 1))?.map(|offset| bits / 8 + offset)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// `struct area { int a; union { struct { int b; int c; }; int d; }; };` and `void f(void);`
    fn sample() -> Vec<u8> {
        let strings = b"\0area\0a\0b\0c\0d\0f\0int\0";
        let words: &[u32] = &[
            // 1: int
            16,
            1 << 24,
            4,
            32,
            // 2: struct { int b; int c; }
            0,
            STRUCT << 24 | 2,
            8,
            8,
            1,
            0,
            10,
            1,
            32,
            // 3: union { struct 2; int d; }
            0,
            UNION << 24 | 2,
            8,
            0,
            2,
            0,
            12,
            1,
            0,
            // 4: struct area
            1,
            STRUCT << 24 | 2,
            12,
            6,
            1,
            0,
            0,
            3,
            32,
            // 5: its prototype, 6: f
            0,
            13 << 24,
            0,
            14,
            FUNCTION << 24,
            5,
        ];
        let types: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
        let header = [24, 0, length(&types), length(&types), length(strings)];
        let header: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        [&MAGIC.to_le_bytes()[..], &[1, 0], &header, &types, strings].concat()
    }

    #[test]
    fn members_of_structures_without_a_name_are_found() {
        let bytes = sample();
        let types = Types::read(&bytes).unwrap();
        assert_eq!(
            ["a", "b", "c", "d", "e"].map(|name| types.offset("area", name)),
            [Some(0), Some(4), Some(8), Some(4), None]
        );
        assert_eq!(
            (types.function("f"), types.function("area"), types.offset("f", "a")),
            (Some(6), None, None)
        );
    }

    #[test]
    fn what_is_cut_short_or_is_something_else_is_refused() {
        let bytes = sample();
        // Beyond the types only names are missing.
        for length in 0..bytes.len() - 20 {
            assert!(Types::read(&bytes[..length]).is_none(), "{length}");
        }
        assert!(Types::read(&[b"x", &bytes[1..]].concat()).is_none());
    }

    #[test]
    fn the_kernels_own_can_be_read() {
        let Ok(bytes) = std::fs::read(KERNEL) else { return };
        let types = Types::read(&bytes).unwrap();
        assert!(types.function("bpf_iter_task_vma").is_some());
        let offsets = ["vm_start", "vm_end", "vm_flags"].map(|name| types.offset("vm_area_struct", name));
        assert!(offsets.iter().all(Option::is_some) && offsets[0] < offsets[1], "{offsets:?}");
    }
}

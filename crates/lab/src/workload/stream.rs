//! Streams of bytes without a pattern, of which any part can be made by itself: both ends of a connection
//! know what is due at each place of it.

/// Fills `out` with what stream `number` holds from `offset` on.
pub fn fill(number: u64, offset: u64, out: &mut [u8]) {
    const WIDTH: u64 = size_of::<u64>() as u64;
    let (mut word, mut within) = (offset / WIDTH, offset % WIDTH);
    let mut rest = out;
    while !rest.is_empty() {
        let bytes = mixed(number, word).to_le_bytes();
        let fresh = bytes.get(usize::try_from(within).unwrap_or(0)..).unwrap_or_default();
        let length = fresh.len().min(rest.len());
        let (now, later) = rest.split_at_mut(length);
        now.copy_from_slice(fresh.get(..length).unwrap_or_default());
        (rest, word, within) = (later, word + 1, 0);
    }
}

/// What stream `number` holds from `offset` on.
pub fn part(number: u64, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fill(number, offset, &mut bytes);
    bytes
}

/// Tells sequences of bytes apart (FNV-1a, 64 bits); begin with 0 and go on with what was returned.
#[must_use]
pub fn digest(before: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(before ^ 0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    }) ^ 0xcbf2_9ce4_8422_2325
}

/// SplitMix64 (Steele, Lea, Flood 2014), begun at another place for each stream.
fn mixed(number: u64, word: u64) -> u64 {
    let place = number.wrapping_mul(0x0001_0000_0001).wrapping_add(word + 1);
    let state = place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_same_whatever_it_is_made_with() {
        let whole = part(7, 0, 1000);
        for (from, length) in [(0, 1), (1, 7), (7, 9), (8, 16), (13, 500), (999, 1), (40, 0)] {
            assert_eq!(part(7, from as u64, length), &whole[from..from + length], "{from} {length}");
        }
        assert_eq!(digest(digest(0, &whole[..333]), &whole[333..]), digest(0, &whole));
        assert_ne!(digest(0, &whole[1..]), digest(0, &whole[..999]));
        assert_ne!(part(8, 0, 8), &whole[..8]);
        assert_ne!(part(7, 8, 8), &whole[..8]);
    }
}

//! A message of Protocol Buffers taken apart into its fields, so that some can be changed while all others, also those
//! that nobody here knows, stay byte for byte (<https://protobuf.dev/programming-guides/encoding/>).
//!
//! A field that CRIU writes once counts as damaged where it is there twice: readers differ in what they make of that.

use std::borrow::Cow;

use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};

/// The fields of a message, in the order in which they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fields<'a>(Vec<Field<'a>>);

/// A field.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field<'a> {
    tag: u32,
    /// Key and content, as they are written.
    whole: Cow<'a, [u8]>,
    content: Content<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content<'a> {
    Number(u64),
    Bytes(Cow<'a, [u8]>),
    /// Of a fixed length: CRIU's images have few, and none is looked at here.
    Fixed,
}

/// Most fields of a message that has no long list: each takes much more memory than the two bytes that it can be of.
const MOST: usize = 4096;

impl<'a> Fields<'a> {
    /// Takes a message apart; the error says what is wrong with it.
    pub(crate) fn decode(message: &'a [u8]) -> Result<Self, String> {
        Self::decode_at_most(MOST, message)
    }

    /// The same, of a message with a list that can be as long.
    pub(crate) fn decode_at_most(most: usize, mut message: &'a [u8]) -> Result<Self, String> {
        let mut fields = Vec::new();
        while !message.is_empty() {
            if fields.len() == most {
                return Err(format!("it has more than {most} fields"));
            }
            let whole = message;
            let failed = |error: prost::DecodeError| error.to_string();
            let (tag, kind) = decode_key(&mut message).map_err(failed)?;
            let mut take = |length: usize| {
                let (taken, rest) =
                    message.split_at_checked(length).ok_or(format!("it ends inside field {tag}"))?;
                message = rest;
                Ok::<_, String>(taken)
            };
            let content = match kind {
                WireType::Varint => Content::Number(decode_varint(&mut message).map_err(failed)?),
                WireType::LengthDelimited => {
                    let length = decode_varint(&mut message).map_err(failed)?;
                    let (taken, rest) = usize::try_from(length)
                        .ok()
                        .and_then(|length| message.split_at_checked(length))
                        .ok_or(format!("it ends inside field {tag}"))?;
                    message = rest;
                    Content::Bytes(Cow::Borrowed(taken))
                }
                WireType::SixtyFourBit => take(8).map(|_| Content::Fixed)?,
                WireType::ThirtyTwoBit => take(4).map(|_| Content::Fixed)?,
                WireType::StartGroup | WireType::EndGroup => {
                    return Err(format!("its field {tag} is a group, and CRIU writes none"));
                }
            };
            let whole = Cow::Borrowed(&whole[..whole.len() - message.len()]);
            fields.push(Field { tag, whole, content });
        }
        Ok(Self(fields))
    }

    /// The message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.0.iter().map(|field| field.whole.len()).sum());
        for field in &self.0 {
            message.extend_from_slice(&field.whole);
        }
        message
    }

    /// The number in a field that is there once at most.
    pub(crate) fn number(&self, tag: u32) -> Result<Option<u64>, String> {
        match self.single(tag)? {
            None => Ok(None),
            Some(Content::Number(number)) => Ok(Some(*number)),
            Some(_) => Err(format!("its field {tag} is no number")),
        }
    }

    /// The same, of 32 bits.
    pub(crate) fn number32(&self, tag: u32) -> Result<Option<u32>, String> {
        let number = self.number(tag)?.map(u32::try_from).transpose();
        number.map_err(|_| format!("its field {tag} has more than 32 bits"))
    }

    /// The bytes in a field that is there once at most.
    pub(crate) fn bytes(&self, tag: u32) -> Result<Option<&[u8]>, String> {
        match self.single(tag)? {
            None => Ok(None),
            Some(Content::Bytes(bytes)) => Ok(Some(bytes)),
            Some(_) => Err(format!("its field {tag} has no length")),
        }
    }

    /// The bytes in each field of this tag.
    pub(crate) fn all(&self, tag: u32) -> Result<Vec<&[u8]>, String> {
        let contents = self.0.iter().filter(|field| field.tag == tag).map(|field| match &field.content {
            Content::Bytes(bytes) => Ok(&**bytes),
            _ => Err(format!("its field {tag} has no length")),
        });
        contents.collect()
    }

    /// The numbers in the fields of this tag, one in each, or many in one.
    pub(crate) fn numbers(&self, tag: u32) -> Result<Vec<u64>, String> {
        let mut numbers = Vec::new();
        for field in self.0.iter().filter(|field| field.tag == tag) {
            match &field.content {
                Content::Number(number) => numbers.push(*number),
                Content::Bytes(bytes) => {
                    let mut rest = &**bytes;
                    while !rest.is_empty() {
                        numbers.push(decode_varint(&mut rest).map_err(|error| error.to_string())?);
                    }
                }
                Content::Fixed => return Err(format!("its field {tag} is no number")),
            }
        }
        Ok(numbers)
    }

    /// Is there a field of this tag?
    pub(crate) fn has(&self, tag: u32) -> bool {
        self.0.iter().any(|field| field.tag == tag)
    }

    /// Removes all fields of a tag.
    pub(crate) fn remove(&mut self, tag: u32) {
        self.0.retain(|field| field.tag != tag);
    }

    /// Puts a number where the field was, or where it belongs by its tag.
    pub(crate) fn set_number(&mut self, tag: u32, number: u64) {
        self.replace(tag, [Field::number(tag, number)]);
    }

    /// The same with bytes.
    pub(crate) fn set_bytes(&mut self, tag: u32, bytes: Vec<u8>) {
        self.replace(tag, [Field::bytes(tag, bytes)]);
    }

    /// The same with several.
    pub(crate) fn set_all(&mut self, tag: u32, all: impl IntoIterator<Item = Vec<u8>>) {
        self.replace(tag, all.into_iter().map(|bytes| Field::bytes(tag, bytes)));
    }

    /// The same with numbers, one in each field.
    pub(crate) fn set_numbers(&mut self, tag: u32, numbers: impl IntoIterator<Item = u64>) {
        self.replace(tag, numbers.into_iter().map(|number| Field::number(tag, number)));
    }

    /// Changes the message in a field, if it is there; whether it is.
    pub(crate) fn change(
        &mut self,
        tag: u32,
        change: impl FnOnce(&mut Fields<'_>) -> Result<(), String>,
    ) -> Result<bool, String> {
        self.change_at_most(MOST, tag, change)
    }

    /// The same, of a message with a list that can be as long.
    pub(crate) fn change_at_most(
        &mut self,
        most: usize,
        tag: u32,
        change: impl FnOnce(&mut Fields<'_>) -> Result<(), String>,
    ) -> Result<bool, String> {
        let Some(inner) = self.bytes(tag)? else { return Ok(false) };
        let mut fields = Fields::decode_at_most(most, inner)?;
        change(&mut fields)?;
        let changed = fields.encode();
        if changed != inner {
            self.set_bytes(tag, changed);
        }
        Ok(true)
    }

    fn single(&self, tag: u32) -> Result<Option<&Content<'a>>, String> {
        let mut found = self.0.iter().filter(|field| field.tag == tag);
        let first = found.next().map(|field| &field.content);
        if found.next().is_some() {
            return Err(format!("it has field {tag} twice"));
        }
        Ok(first)
    }

    fn replace(&mut self, tag: u32, new: impl IntoIterator<Item = Field<'a>>) {
        let is_here = |field: &Field<'_>| field.tag == tag;
        let here = self.0.iter().position(is_here);
        let at = here.or_else(|| self.0.iter().position(|field| field.tag > tag)).unwrap_or(self.0.len());
        self.0.retain(|field| !is_here(field));
        self.0.splice(at..at, new);
    }
}

impl Field<'_> {
    fn number(tag: u32, number: u64) -> Self {
        let whole = of_numbers([(tag, number)]);
        Self { tag, whole: Cow::Owned(whole), content: Content::Number(number) }
    }

    fn bytes(tag: u32, bytes: Vec<u8>) -> Self {
        let mut whole = Vec::new();
        encode_key(tag, WireType::LengthDelimited, &mut whole);
        encode_varint(bytes.len() as u64, &mut whole);
        whole.extend_from_slice(&bytes);
        Self { tag, whole: Cow::Owned(whole), content: Content::Bytes(Cow::Owned(bytes)) }
    }
}

/// A message whose fields are these numbers, in this order.
pub(crate) fn of_numbers(numbers: impl IntoIterator<Item = (u32, u64)>) -> Vec<u8> {
    let mut message = Vec::new();
    for (tag, number) in numbers {
        encode_key(tag, WireType::Varint, &mut message);
        encode_varint(number, &mut message);
    }
    message
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Field 1 as a number that is longer than it has to be, 2 with a length, 3 and 4 of fixed length, 200.
    const MESSAGE: &[u8] = &[
        0x08, 0x85, 0x00, 0x12, 2, b'a', b'b', 0x19, 1, 2, 3, 4, 5, 6, 7, 8, 0x25, 1, 2, 3, 4, 0xc0, 0x0c, 7,
    ];

    #[test]
    fn what_is_not_changed_stays_byte_for_byte() {
        let mut fields = Fields::decode(MESSAGE).unwrap();
        assert_eq!(fields.encode(), MESSAGE);
        assert_eq!(fields.number(1), Ok(Some(5)));
        assert_eq!(fields.bytes(2), Ok(Some(&b"ab"[..])));
        assert_eq!(fields.number(9), Ok(None));
        fields.set_bytes(2, b"xyz".to_vec());
        assert_eq!(fields.encode(), [&MESSAGE[..3], &[0x12, 3], b"xyz", &MESSAGE[7..]].concat());
        fields.set_number(5, 1);
        assert_eq!(
            fields.encode(),
            [&MESSAGE[..3], &[0x12, 3], b"xyz", &MESSAGE[7..21], &[0x28, 1], &MESSAGE[21..]].concat()
        );
        fields.remove(200);
        fields.set_numbers(300, [1, 2]);
        assert!(fields.encode().ends_with(&[0x28, 1, 0xe0, 0x12, 1, 0xe0, 0x12, 2]));
        assert_eq!(fields.numbers(300), Ok(vec![1, 2]));
    }

    #[test]
    fn numbers_are_read_one_in_a_field_or_many_in_one() {
        let fields = Fields::decode(&[0x08, 1, 0x0a, 3, 2, 0x80, 1, 0x08, 4]).unwrap();
        assert_eq!(fields.numbers(1), Ok(vec![1, 2, 128, 4]));
        assert!(fields.number(1).is_err(), "twice");
        assert!(Fields::decode(&[0x0a, 1, 0x80]).unwrap().numbers(1).is_err());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for message in [&[0x1a, 9, 1][..], &[0x08], &[0x19, 1], &[0x25, 1, 2], &[0x0b, 0x0c], &[0x07]] {
            assert!(Fields::decode(message).is_err(), "{message:x?}");
        }
        let fields = Fields::decode(MESSAGE).unwrap();
        assert!(fields.number(2).is_err() && fields.bytes(1).is_err() && fields.all(3).is_err());
        assert!(fields.numbers(3).is_err());
    }

    #[test]
    fn more_fields_than_a_message_has_are_refused() {
        let fields = |count| [8, 1].repeat(count);
        assert!(Fields::decode(&fields(MOST)).is_ok());
        let error = Fields::decode(&fields(MOST + 1)).unwrap_err();
        assert_eq!(error, "it has more than 4096 fields");
        assert!(Fields::decode_at_most(MOST + 1, &fields(MOST + 1)).is_ok());
        let mut outer = Fields::default();
        outer.set_bytes(3, fields(MOST + 1));
        assert!(outer.change(3, |_| Ok(())).is_err());
        assert_eq!(outer.change_at_most(MOST + 1, 3, |_| Ok(())), Ok(true));
    }

    proptest! {
        #[test]
        fn any_bytes_come_back_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(fields) = Fields::decode(&bytes) {
                prop_assert_eq!(fields.encode(), bytes);
            }
        }
    }
}

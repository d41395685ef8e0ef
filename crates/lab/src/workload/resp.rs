//! The Redis protocol, version 2 (<https://redis.io/docs/latest/develop/reference/protocol-spec/>).

/// The longest bulk string that is taken; Redis itself allows 512 MiB.
const MAX_BULK: usize = 512 << 20;
/// The deepest nesting of arrays that is taken.
const MAX_DEPTH: usize = 8;

/// An answer of Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+OK`
    Simple(String),
    /// `-ERR …`
    Error(String),
    /// `:1`
    Integer(i64),
    /// `$3 abc`; none for a null.
    Bulk(Option<Vec<u8>>),
    /// `*2 …`; none for a null.
    Array(Option<Vec<Reply>>),
}

/// What is wrong with bytes that are no answer of Redis.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not an answer of Redis: {0}")]
pub struct NotResp(&'static str);

/// Appends a request to `out`.
pub fn encode(out: &mut Vec<u8>, words: &[&[u8]]) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

/// The first answer in `bytes` and its length; none while it is not there whole.
///
/// # Errors
/// The bytes are something else.
pub fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, NotResp> {
    let mut reader = Reader { bytes, at: 0 };
    Ok(reader.reply(0)?.map(|reply| (reply, reader.at)))
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl Reader<'_> {
    fn reply(&mut self, depth: usize) -> Result<Option<Reply>, NotResp> {
        if depth > MAX_DEPTH {
            return Err(NotResp("arrays are nested too deep"));
        }
        let Some(line) = self.line() else { return Ok(None) };
        let (kind, text) = match line.split_first() {
            Some((kind, text)) => (*kind, String::from_utf8_lossy(text).into_owned()),
            None => return Err(NotResp("a line is empty")),
        };
        match kind {
            b'+' => Ok(Some(Reply::Simple(text))),
            b'-' => Ok(Some(Reply::Error(text))),
            b':' => Ok(Some(Reply::Integer(number(&text)?))),
            b'$' => self.bulk(number(&text)?),
            b'*' => self.array(number(&text)?, depth),
            _ => Err(NotResp("a line begins with an unknown type")),
        }
    }

    fn bulk(&mut self, length: i64) -> Result<Option<Reply>, NotResp> {
        if length == -1 {
            return Ok(Some(Reply::Bulk(None)));
        }
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_BULK);
        let length = length.ok_or(NotResp("a length is out of range"))?;
        let Some(bytes) = self.bytes.get(self.at..self.at + length + 2) else { return Ok(None) };
        let Some(content) = bytes.strip_suffix(b"\r\n") else {
            return Err(NotResp("a string does not end where it should"));
        };
        self.at += length + 2;
        Ok(Some(Reply::Bulk(Some(content.to_vec()))))
    }

    fn array(&mut self, length: i64, depth: usize) -> Result<Option<Reply>, NotResp> {
        if length == -1 {
            return Ok(Some(Reply::Array(None)));
        }
        let length = usize::try_from(length).map_err(|_| NotResp("a length is out of range"))?;
        let mut entries = Vec::new();
        for _ in 0..length {
            match self.reply(depth + 1)? {
                Some(entry) => entries.push(entry),
                None => return Ok(None),
            }
        }
        Ok(Some(Reply::Array(Some(entries))))
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let rest = self.bytes.get(self.at..)?;
        let length = rest.windows(2).position(|pair| pair == b"\r\n")?;
        self.at += length + 2;
        rest.get(..length).map(<[u8]>::to_vec)
    }
}

fn number(text: &str) -> Result<i64, NotResp> {
    text.parse().map_err(|_| NotResp("a number does not parse"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_arrays_of_strings() {
        let mut out = Vec::new();
        encode(&mut out, &[b"SET", b"k", b"a\r\nb"]);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n");
    }

    #[test]
    fn answers_are_read_once_they_are_whole() {
        let array = Reply::Array(Some(vec![
            Reply::Bulk(Some(b"a\r\n".to_vec())),
            Reply::Integer(-2),
            Reply::Bulk(None),
        ]));
        for (bytes, reply) in [
            (&b"+OK\r\n"[..], Reply::Simple("OK".into())),
            (b"-ERR no\r\n", Reply::Error("ERR no".into())),
            (b":42\r\n", Reply::Integer(42)),
            (b"$0\r\n\r\n", Reply::Bulk(Some(Vec::new()))),
            (b"*-1\r\n", Reply::Array(None)),
            (b"*3\r\n$3\r\na\r\n\r\n:-2\r\n$-1\r\n", array),
        ] {
            for end in 0..bytes.len() {
                assert_eq!(parse(&bytes[..end]).unwrap(), None, "{end}");
            }
            let mut longer = bytes.to_vec();
            longer.extend_from_slice(b"+next");
            assert_eq!(parse(&longer).unwrap(), Some((reply, bytes.len())));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        for bytes in
            [&b"HTTP/1.1 200\r\n"[..], b"\r\n", b":x\r\n", b"$-2\r\n", b"$99999999999\r\n", b"$1\r\nabc"]
        {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
        assert!(parse(&b"*1\r\n".repeat(100)).is_err());
    }
}

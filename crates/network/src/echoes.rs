//! Times that clients echo (TCP timestamps, RFC 7323) in segments that were held in a pause.
//!
//! A socket takes what has passed since the time that is echoed for a round trip. Of a segment that was held it
//! would learn that the way takes as long as the pause: its time-out becomes three times that, and with BBR it
//! sends accordingly slowly, for seconds. So held segments echo no time, which is said by a zero; sockets then
//! learn nothing from them.

use crate::packet::OFFLOAD_HEADER;

const LINK_HEADER: usize = 14;
const TCP: u8 = 6;
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the sum is that of the addresses only, and the rest is added later.
const UNFINISHED_SUM: u8 = 1;
const TIMESTAMPS: u8 = 8;

/// Has a frame, with its offload header, echo no time. What is not TCP, or cut short, stays as it is.
pub(crate) fn forget_time(frame: &mut [u8]) {
    let Some(begin) = segment_begin(frame) else { return };
    let unfinished = frame.first().is_some_and(|flags| flags & UNFINISHED_SUM != 0);
    let Some(segment) = frame.get_mut(begin..) else { return };
    let Some(echo) = echo_place(segment) else { return };
    let sum = segment.get(16..18).and_then(|sum| sum.try_into().ok()).map(u16::from_be_bytes);
    let (Some(sum), Some(echoed)) = (sum, segment.get_mut(echo..echo + 4)) else { return };
    // RFC 1624, with nothing in place of what was there.
    let mut changed = u32::from(!sum);
    for (at, byte) in echoed.iter_mut().enumerate() {
        let word = u16::from(*byte) << if (echo + at).is_multiple_of(2) { 8 } else { 0 };
        changed += u32::from(!word);
        *byte = 0;
    }
    while changed > 0xffff {
        changed = (changed & 0xffff) + (changed >> 16);
    }
    if !unfinished && let Some(place) = segment.get_mut(16..18) {
        place.copy_from_slice(&(!u16::try_from(changed).unwrap_or_default()).to_be_bytes());
    }
}

/// Where TCP begins in a frame: over IPv4, its first fragment, or over IPv6 without extension headers.
fn segment_begin(frame: &[u8]) -> Option<usize> {
    let ip = OFFLOAD_HEADER + LINK_HEADER;
    match frame.get(ip - 2..ip)? {
        [0x08, 0x00] => {
            let offset = u16::from_be_bytes(frame.get(ip + 6..ip + 8)?.try_into().ok()?) & 0x1fff;
            let length = usize::from(frame.get(ip)? & 0x0f) * 4;
            (offset == 0 && *frame.get(ip + 9)? == TCP).then_some(ip + length)
        }
        [0x86, 0xdd] => (*frame.get(ip + 6)? == TCP).then_some(ip + 40),
        _ => None,
    }
}

/// Where the echoed time is in a segment.
fn echo_place(segment: &[u8]) -> Option<usize> {
    let end = usize::from(segment.get(12)? >> 4) * 4;
    let mut at = 20;
    while at < end {
        let length = match *segment.get(at)? {
            0 => return None,
            1 => 1,
            kind => {
                let length = usize::from(*segment.get(at + 1)?);
                if kind == TIMESTAMPS && length == 10 && at + length <= end {
                    return Some(at + 6);
                }
                length.max(2)
            }
        };
        at += length;
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sum of all of it, with the addresses, is zero if the check sum is right.
    fn sum(bytes: &[u8]) -> u16 {
        let mut sum: u32 = 0;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    /// A frame, and where its segment begins. `fill` options of one byte stand before that for timestamps.
    fn frame(v6: bool, fill: usize, echoed: u32) -> (Vec<u8>, usize) {
        let mut segment = vec![0x9c, 0x40, 0, 80, 0, 0, 0, 9, 0, 0, 0, 7, 0, 0x18, 1, 0, 0, 0, 0, 0];
        segment.extend(vec![1; fill]);
        segment.extend([8, 10, 1, 2, 3, 4]);
        segment.extend(echoed.to_be_bytes());
        segment.resize(segment.len().next_multiple_of(4), 0);
        segment[12] = u8::try_from(segment.len() / 4).unwrap() << 4;
        segment.extend(b"request");
        // The addresses are all zero, which leaves protocol and length.
        let rest = [0, 6, 0, u8::try_from(segment.len()).unwrap()];
        let right = sum(&[&rest[..], &segment].concat());
        segment[16..18].copy_from_slice(&right.to_be_bytes());
        let mut frame = vec![0; OFFLOAD_HEADER + 12];
        if v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 6, 64]);
            frame.extend([0; 32]);
        } else {
            frame.extend([0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0]);
            frame.extend([0; 8]);
        }
        let begin = frame.len();
        frame.extend(segment);
        (frame, begin)
    }

    #[test]
    fn a_segment_echoes_no_time_and_its_sum_is_right() {
        for v6 in [false, true] {
            for fill in 0..4 {
                for echoed in [0, 1, 0xffff, 0xdead_beef, u32::MAX] {
                    let (mut changed, begin) = frame(v6, fill, echoed);
                    forget_time(&mut changed);
                    let (mut due, _) = frame(v6, fill, 0);
                    // Zero has two ways to be written.
                    let length = u8::try_from(changed.len() - begin).unwrap();
                    let all = [&[0, 6, 0, length][..], &changed[begin..]].concat();
                    assert_eq!(sum(&all), 0, "{v6} {fill} {echoed:#x}");
                    let place = begin + 16..begin + 18;
                    due[place.clone()].copy_from_slice(&[0, 0]);
                    changed[place].copy_from_slice(&[0, 0]);
                    assert_eq!(changed, due);
                }
            }
        }
    }

    #[test]
    fn a_sum_that_is_still_to_be_made_stays() {
        let (mut unfinished, begin) = frame(false, 2, 5);
        unfinished[0] = UNFINISHED_SUM;
        let before = unfinished[begin + 16..begin + 18].to_vec();
        forget_time(&mut unfinished);
        assert_eq!(unfinished[begin + 16..begin + 18], before);
        assert_eq!(unfinished[begin + 28..begin + 32], [0; 4]);
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..120), v6: bool, fill in 0..4_usize) {
            forget_time(&mut bytes.clone());
            let (mut headed, begin) = frame(v6, fill, 1);
            headed.truncate(begin);
            headed.extend(&bytes);
            forget_time(&mut headed);
        }
    }
}

//! What the OCR server of the base is asked: a page of digits, and the text that is on it.

/// The digits in a font of five by seven dots: a row is five bits, the first of them the left one.
const DIGITS: [[u8; 7]; 10] = [
    [0b01110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110],
    [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110],
    [0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111],
    [0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110],
    [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010],
    [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110],
    [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110],
    [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000],
    [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110],
    [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100],
];
/// Digits of a line.
const LINE: usize = 40;
/// Dots from one digit to the next, from one line to the next, and to the page's edges.
const ACROSS: usize = 7;
const DOWN: usize = 11;
const EDGE: usize = 4;
/// Pixels of a dot, in both directions.
const PIXELS: usize = 2;
const WHITE: u8 = 255;

/// A page with so many lines of digits as PGM (Netpbm's grey map), and the text that GOCR reads on it.
#[must_use]
pub fn page(lines: usize) -> (Vec<u8>, String) {
    let (width, height) = ((LINE * ACROSS + EDGE) * PIXELS, (lines * DOWN + EDGE) * PIXELS);
    let mut dots = vec![WHITE; width * height];
    let mut text = String::new();
    let mut random = 1_u32;
    for line in 0..lines {
        for column in 0..LINE {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let digit = (random >> 24) % 10;
            text.extend(char::from_digit(digit, 10));
            for (row, bits) in DIGITS.get(digit as usize).into_iter().flatten().enumerate() {
                for x in (0..5).filter(|x| bits >> (4 - x) & 1 == 1) {
                    let (x, y) = (EDGE + column * ACROSS + x, EDGE + line * DOWN + row);
                    for pixel in 0..PIXELS * PIXELS {
                        let (x, y) = (x * PIXELS + pixel % PIXELS, y * PIXELS + pixel / PIXELS);
                        if let Some(dot) = dots.get_mut(y * width + x) {
                            *dot = 0;
                        }
                    }
                }
            }
        }
        text.push('\n');
    }
    let mut picture = format!("P5\n{width} {height}\n255\n").into_bytes();
    picture.append(&mut dots);
    (picture, text)
}

/// What a client of the image `godwit/gocr` sends to have a page of so many lines read, and the answer that is due.
#[must_use]
pub fn question(lines: usize) -> (Vec<u8>, Vec<u8>) {
    let (picture, text) = page(lines);
    let mut question = format!("{}\n", picture.len()).into_bytes();
    question.extend(picture);
    (question, format!("{text}\n").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_lines_of_its_text() {
        let (picture, text) = page(3);
        assert_eq!(text.lines().map(str::len).collect::<Vec<_>>(), [LINE; 3]);
        assert!(picture.starts_with(b"P5\n568 74\n255\n"));
        assert_eq!(picture.len(), b"P5\n568 74\n255\n".len() + 568 * 74);
        let (question, answer) = question(3);
        assert!(question.starts_with(format!("{}\nP5\n", picture.len()).as_bytes()));
        assert!(answer.ends_with(b"\n\n") && text.chars().filter(char::is_ascii_digit).count() == 3 * LINE);
    }
}

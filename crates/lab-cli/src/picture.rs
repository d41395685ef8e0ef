//! How pictures look. Each is as wide as a README shows it, on a light ground, in colours that are told
//! apart by people who see fewer (Okabe and Ito 2008, <https://jfly.uni-koeln.de/color/>).

use plotters::{coord::Shift, prelude::*};

pub(crate) const WIDTH: u32 = 860;
const FONT: &str = "sans-serif";

pub(crate) const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);
pub(crate) const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
pub(crate) const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
pub(crate) const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
pub(crate) const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
pub(crate) const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
pub(crate) const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
pub(crate) const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
pub(crate) const GREY: RGBColor = RGBColor(0x99, 0x99, 0x99);

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(crate) fn text(size: u32) -> TextStyle<'static> {
    TextStyle::from((FONT, size).into_font()).color(&INK)
}

pub(crate) fn title(area: &Area<'_>, words: &str) -> anyhow::Result<()> {
    area.draw(&Text::new(words.to_owned(), (14, 12), text(19)))?;
    Ok(())
}

/// Some six times, in seconds, by which what happened in so many seconds can be read.
pub(crate) fn times(seconds: f64) -> impl Iterator<Item = f64> {
    let apart = (seconds / 6.0).ceil().max(1.0);
    (0..).map(move |number| f64::from(number) * apart).take_while(move |at| *at <= seconds)
}

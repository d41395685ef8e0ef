//! The picture of an experiment: a row for each setting, from its lowest value to its highest, on a logarithmic scale of
//! milliseconds.

use std::path::Path;

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::picture::{GREY, GRID, INK, VERMILION, WIDTH, text, title};

const LEFT: i32 = 330;
const RIGHT: i32 = 90;
const TOP: i32 = 48;
const ROW: i32 = 24;
const BOTTOM: i32 = 34;

/// What was found in one setting.
pub(super) struct Row {
    pub(super) label: String,
    pub(super) colour: RGBColor,
    pub(super) low: f64,
    pub(super) middle: f64,
    pub(super) high: f64,
}

/// What others have found, in their words, and where these put it.
pub(super) struct Paper {
    pub(super) label: &'static str,
    pub(super) from: f64,
    pub(super) to: f64,
}

/// The decades that hold all values.
fn scale(rows: &[Row], further: impl IntoIterator<Item = f64>) -> (i32, i32) {
    let all = rows.iter().flat_map(|row| [row.low, row.high]).chain(further);
    let positive: Vec<f64> = all.filter(|value| *value > 0.0).collect();
    let low = positive.iter().copied().fold(f64::INFINITY, f64::min);
    let high = positive.iter().copied().fold(0.0, f64::max);
    if positive.is_empty() {
        return (0, 1);
    }
    #[allow(clippy::cast_possible_truncation)]
    let decades = (low.log10().floor() as i32, high.log10().ceil() as i32);
    (decades.0.clamp(-6, 8), decades.1.clamp(decades.0.clamp(-6, 8) + 1, 9))
}

pub(super) fn draw(
    path: &Path,
    words: &str,
    (rows, paper): (&[Row], &Paper),
    goal: Option<f64>,
) -> anyhow::Result<()> {
    let width = i32::try_from(WIDTH)?;
    let bottom = TOP + (i32::try_from(rows.len())? + 1) * ROW;
    let root = SVGBackend::new(path, (WIDTH, u32::try_from(bottom + BOTTOM)?)).into_drawing_area();
    root.fill(&WHITE)?;
    title(&root, words)?;
    let (first, last) = scale(rows, [paper.from, paper.to].into_iter().chain(goal));
    let place = |value: f64| {
        let part = (value.max(1e-9).log10() - f64::from(first)) / f64::from(last - first);
        #[allow(clippy::cast_possible_truncation)]
        let across = (f64::from(width - LEFT - RIGHT) * part.clamp(0.0, 1.0)) as i32;
        LEFT + across
    };
    for decade in first..=last {
        let (value, x) = (10_f64.powi(decade), place(10_f64.powi(decade)));
        root.draw(&PathElement::new(vec![(x, TOP), (x, bottom)], GRID))?;
        let style = text(14).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(format!("{value} ms"), (x, bottom + 8), style))?;
    }
    if let Some(goal) = goal {
        let x = place(goal);
        root.draw(&PathElement::new(vec![(x, TOP), (x, bottom)], VERMILION.stroke_width(2)))?;
    }
    for (number, row) in (0..).zip(rows) {
        let y = TOP + number * ROW + ROW / 2;
        let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(row.label.clone(), (LEFT - 10, y), style))?;
        let line = vec![(place(row.low), y), (place(row.high), y)];
        root.draw(&PathElement::new(line, row.colour.stroke_width(5)))?;
        root.draw(&Circle::new((place(row.middle), y), 5, INK.filled()))?;
        let style = text(14).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(shown(row.middle), (place(row.high) + 10, y), style))?;
    }
    let y = bottom - ROW / 2;
    let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
    root.draw(&Text::new(paper.label, (LEFT - 10, y), style))?;
    root.draw(&Rectangle::new(
        [(place(paper.from), y - 7), (place(paper.to), y + 7)],
        GREY.mix(0.5).filled(),
    ))?;
    root.present()?;
    Ok(())
}

/// A time with as many digits as say something.
fn shown(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_of_whole_decades_around_all_values() {
        let row = |low, high| Row { label: String::new(), colour: INK, low, middle: low, high };
        assert_eq!(scale(&[row(0.3, 12.0), row(2.0, 99.0)], []), (-1, 2));
        assert_eq!(scale(&[row(2.0, 3.0)], [200.0]), (0, 3));
        assert_eq!(scale(&[row(1.0, 1.0)], []), (0, 1));
        assert_eq!(scale(&[row(0.0, 0.0)], []), (0, 1));
    }

    #[test]
    fn a_picture_has_each_row_and_its_middle() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("x.svg");
        let rows = [Row { label: "64 threads".into(), colour: INK, low: 1.0, middle: 2.5, high: 30.0 }];
        let paper = Paper { label: "the paper: less than a second", from: 0.0, to: 1000.0 };
        draw(&path, "Rest", (&rows, &paper), Some(10.0)).expect("it is drawn");
        let text = std::fs::read_to_string(path).expect("it is written");
        assert!(
            ["Rest", "64 threads", "2.5 ms", "10 ms", "less than a second"]
                .iter()
                .all(|word| text.contains(word)),
            "{text}"
        );
    }
}

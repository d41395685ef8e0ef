//! The picture of an experiment: a row for each setting, from its lowest value to its highest, on a logarithmic scale.

use std::path::Path;

use anyhow::Context as _;
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::quantile;
use crate::picture::{GREY, GRID, INK, VERMILION, WIDTH, text, title};

const LEFT: i32 = 330;
const RIGHT: i32 = 90;
const TOP: i32 = 48;
const ROW: i32 = 24;
const BOTTOM: i32 = 34;

/// What is drawn.
pub(super) struct Picture<'t> {
    pub(super) title: &'t str,
    /// The unit of all values.
    pub(super) unit: &'static str,
    pub(super) rows: Vec<Row>,
    pub(super) paper: Option<Paper>,
    /// Where a line is drawn.
    pub(super) goal: Option<f64>,
}

/// What was found in one setting.
pub(super) struct Row {
    pub(super) label: String,
    pub(super) colour: RGBColor,
    pub(super) low: f64,
    pub(super) middle: f64,
    pub(super) high: f64,
}

impl Row {
    /// The lowest of ordered values, their median, and the highest; none without values.
    pub(super) fn of(label: String, colour: RGBColor, values: &[f64]) -> Option<Self> {
        let [low, middle, high] = [0.0, 0.5, 1.0].map(|part| quantile(values, part));
        Some(Self { label, colour, low: low?, middle: middle?, high: high? })
    }
}

/// What others have found, in their words, and where these put it.
#[derive(Clone, Copy)]
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

impl Picture<'_> {
    pub(super) fn draw(&self, path: &Path) -> anyhow::Result<()> {
        self.draw_into(path).with_context(|| format!("{} cannot be drawn", path.display()))
    }

    fn draw_into(&self, path: &Path) -> anyhow::Result<()> {
        let Self { rows, paper, goal, unit, .. } = self;
        let width = i32::try_from(WIDTH)?;
        let bottom = TOP + i32::try_from(rows.len() + usize::from(paper.is_some()))? * ROW;
        let root = SVGBackend::new(path, (WIDTH, u32::try_from(bottom + BOTTOM)?)).into_drawing_area();
        root.fill(&WHITE)?;
        title(&root, self.title)?;
        let known = paper.iter().flat_map(|paper| [paper.from, paper.to]).chain(*goal);
        let (first, last) = scale(rows, known);
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
            root.draw(&Text::new(format!("{value} {unit}"), (x, bottom + 8), style))?;
        }
        if let Some(goal) = goal {
            let x = place(*goal);
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
            root.draw(&Text::new(shown(row.middle, unit), (place(row.high) + 10, y), style))?;
        }
        if let Some(paper) = paper {
            let y = bottom - ROW / 2;
            let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
            root.draw(&Text::new(paper.label, (LEFT - 10, y), style))?;
            root.draw(&Rectangle::new(
                [(place(paper.from), y - 7), (place(paper.to), y + 7)],
                GREY.mix(0.5).filled(),
            ))?;
        }
        root.present()?;
        Ok(())
    }
}

/// A value with as many digits as say something.
fn shown(value: f64, unit: &str) -> String {
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
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
        let rows = vec![Row { label: "64 threads".into(), colour: INK, low: 1.0, middle: 2.5, high: 30.0 }];
        let paper = Some(Paper { label: "the paper: less than a second", from: 0.0, to: 1000.0 });
        let picture = Picture { title: "Rest", unit: "ms", rows, paper, goal: Some(10.0) };
        picture.draw(&path).expect("it is drawn");
        let text = std::fs::read_to_string(path).expect("it is written");
        assert!(
            ["Rest", "64 threads", "2.5 ms", "10 ms", "less than a second"]
                .iter()
                .all(|word| text.contains(word)),
            "{text}"
        );
    }
}

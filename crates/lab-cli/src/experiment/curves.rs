//! The picture of an experiment over time: panels below one another, each with a curve for each setting, on a logarithmic
//! scale.

use std::path::Path;

use anyhow::Context as _;
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::picture::{Area, GRID, WIDTH, text, times, title};

const LEFT: i32 = 70;
const RIGHT: i32 = 20;
const TOP: i32 = 44;
const TITLE: i32 = 24;
const PANEL: i32 = 190;
const GAP: i32 = 30;
const BOTTOM: i32 = 30;

pub(super) struct Panel {
    pub(super) title: String,
    pub(super) curves: Vec<Curve>,
}

pub(super) struct Curve {
    pub(super) label: &'static str,
    pub(super) colour: RGBColor,
    /// Seconds, and a value.
    pub(super) points: Vec<(f64, f64)>,
}

impl Panel {
    fn points(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.curves.iter().flat_map(|curve| &curve.points)
    }

    /// The decades that hold all values.
    fn decades(&self) -> (i32, i32) {
        let logs = self.points().filter(|(_, value)| *value > 0.0).map(|(_, value)| value.log10());
        let (low, high) =
            logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| (log.min(low), log.max(high)));
        if low > high {
            return (0, 1);
        }
        #[allow(clippy::cast_possible_truncation)]
        let (first, last) = (low.floor() as i32, high.ceil() as i32);
        (first, last.max(first + 1))
    }
}

/// Draws panels, with words at the foot.
pub(super) fn draw(path: &Path, words: &str, panels: &[Panel], foot: &str) -> anyhow::Result<()> {
    draw_into(path, words, panels, foot).with_context(|| format!("{} cannot be drawn", path.display()))
}

fn draw_into(path: &Path, words: &str, panels: &[Panel], foot: &str) -> anyhow::Result<()> {
    let bottom = TOP + i32::try_from(panels.len())? * (TITLE + PANEL + GAP);
    let root = SVGBackend::new(path, (WIDTH, u32::try_from(bottom + BOTTOM)?)).into_drawing_area();
    root.fill(&WHITE)?;
    title(&root, words)?;
    for (number, panel) in (0..).zip(panels) {
        draw_panel(&root, TOP + number * (TITLE + PANEL + GAP), panel)?;
    }
    root.draw(&Text::new(foot.to_owned(), (14, bottom), text(14)))?;
    root.present()?;
    Ok(())
}

fn draw_panel(root: &Area<'_>, top: i32, panel: &Panel) -> anyhow::Result<()> {
    root.draw(&Text::new(panel.title.clone(), (LEFT, top), text(16)))?;
    for (number, curve) in (0..).zip(&panel.curves) {
        let (x, y) = (LEFT + 250 + number * 150, top + 9);
        root.draw(&PathElement::new(vec![(x, y), (x + 30, y)], curve.colour.stroke_width(4)))?;
        let style = text(14).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(curve.label, (x + 38, y), style))?;
    }
    let (_, area) = root.split_vertically(top + TITLE);
    let (area, _) = area.split_vertically(PANEL);
    let seconds = panel.points().map(|(at, _)| *at).fold(1.0, f64::max);
    let (first, last) = panel.decades();
    let (low, high) = (10_f64.powi(first), 10_f64.powi(last));
    let mut chart = ChartBuilder::on(&area)
        .margin_left(LEFT)
        .margin_right(RIGHT)
        .build_cartesian_2d(0.0..seconds, (low..high).log_scale())?;
    for decade in first..=last {
        let value = 10_f64.powi(decade);
        chart.draw_series(LineSeries::new([(0.0, value), (seconds, value)], GRID))?;
        let (_, y) = chart.backend_coord(&(0.0, value));
        let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(value.to_string(), (LEFT - 8, y), style))?;
    }
    for at in times(seconds) {
        let (x, y) = chart.backend_coord(&(at, low));
        let style = text(14).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(format!("{at:.0} s"), (x, y + 6), style))?;
    }
    for curve in &panel.curves {
        // In a pause nothing is answered.
        let points = curve.points.iter().map(|(at, value)| (*at, value.max(low)));
        chart.draw_series(LineSeries::new(points, curve.colour.stroke_width(2)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::INK;

    #[test]
    fn a_picture_has_each_panel_and_its_curves() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("x.svg");
        let curve =
            Curve { label: "moved", colour: INK, points: vec![(0.5, 300.0), (1.0, 0.0), (2.0, 40.0)] };
        let panel = Panel { title: "one connection".into(), curves: vec![curve] };
        assert_eq!(panel.decades(), (1, 3));
        let none = Panel { title: "nothing".into(), curves: Vec::new() };
        assert_eq!(none.decades(), (0, 1));
        draw(&path, "On the way", &[panel, none], "the paper: more").expect("it is drawn");
        let text = std::fs::read_to_string(path).expect("it is written");
        let words = ["On the way", "one connection", "nothing", "moved", "1000", "2 s", "the paper: more"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

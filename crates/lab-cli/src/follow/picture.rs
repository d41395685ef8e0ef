//! The picture: how long answers took, by rule, above where the client and each service were.

use std::{path::Path, time::Duration};

use plotters::{
    coord::{ranged1d::Ranged as _, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{
    road::{NODES, Road},
    seen::{Move, Seen},
};
use crate::picture::{Area, BLUE, GREEN, GRID, INK, ORANGE, WIDTH, text, times, title};

/// By number of the node.
const COLOURS: [RGBColor; 3] = [BLUE, ORANGE, GREEN];

const LEFT: i32 = 118;
const RIGHT: i32 = 20;
const TOP: i32 = 78;
const PANEL: i32 = 150;
/// What shows where a service was, under its panel.
const STRIP: i32 = 14;
const GAP: i32 = 22;
const BOTTOM: i32 = 26;
/// Milliseconds that can be seen.
const LOW: f64 = 0.5;
const HIGH: f64 = 1000.0;

/// A time in which something was at one node.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stay {
    node: usize,
    from: f64,
    to: f64,
}

pub(super) fn draw(path: &Path, all: &[Seen], road: Road, latency: Duration) -> anyhow::Result<()> {
    let panels = i32::try_from(all.len())?;
    let height = TOP + panels * (PANEL + STRIP + GAP) + BOTTOM;
    let root = SVGBackend::new(path, (WIDTH, u32::try_from(height)?)).into_drawing_area();
    root.fill(&WHITE)?;
    title(&root, "How long a client waits that goes from node to node (log scale)")?;
    let seconds = road.takes.as_secs_f64();
    strip(&root, TOP - STRIP - 10, "client near", &client(road), seconds)?;
    for (number, seen) in (0..).zip(all) {
        let top = TOP + number * (PANEL + STRIP + GAP);
        panel(&root, top, seen, seconds, latency)?;
        strip(&root, top + PANEL, "service on", &service(&seen.moves, seconds), seconds)?;
    }
    draw_times(&root, height - BOTTOM - GAP + 8, seconds)?;
    root.present()?;
    Ok(())
}

fn width() -> i32 {
    i32::try_from(WIDTH).unwrap_or(0)
}

fn panel(root: &Area<'_>, top: i32, seen: &Seen, seconds: f64, latency: Duration) -> anyhow::Result<()> {
    let (_, area) = root.split_vertically(top);
    let (area, _) = area.split_vertically(PANEL);
    let mut chart = ChartBuilder::on(&area)
        .margin_left(LEFT)
        .margin_right(RIGHT)
        .build_cartesian_2d(0.0..seconds, (LOW..HIGH).log_scale())?;
    let line = |at: f64| [(0.0, at), (seconds, at)];
    for tick in [1.0, 10.0, 100.0, 1000.0] {
        chart.draw_series(LineSeries::new(line(tick), GRID))?;
        let (x, y) = chart.backend_coord(&(0.0, tick));
        let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(format!("{tick} ms"), (x - 8, y), style))?;
    }
    let target = latency.as_secs_f64() * 1e3;
    if (LOW..HIGH).contains(&target) {
        chart.draw_series(DashedLineSeries::new(line(target), 4, 4, INK.stroke_width(1)))?;
    }
    let within = |ms: f64| ms.clamp(LOW, HIGH);
    // From the median to the longest: a pause stands out, and is not taken for what is usual.
    let waits = seen.windows.iter().map(|window| {
        let line = vec![(window.at, within(window.median_ms)), (window.at, within(window.most_ms))];
        PathElement::new(line, INK.mix(0.35).stroke_width(2))
    });
    chart.draw_series(waits)?;
    let medians = seen.windows.iter().map(|window| (window.at, within(window.median_ms)));
    chart.draw_series(LineSeries::new(medians, INK.stroke_width(2)))?;
    let style = text(16).pos(Pos::new(HPos::Left, VPos::Top));
    let figures = &seen.figures;
    let says = format!(
        "{}: {:.0} ms on average, over {target:.0} ms for {:.0} s, {}",
        seen.rule,
        figures.average_ms,
        figures.over_s,
        match seen.moves.len() {
            1 => "1 move".to_owned(),
            moves => format!("{moves} moves"),
        }
    );
    root.draw(&Text::new(says, (LEFT + 8, top + 6), style))?;
    Ok(())
}

/// What the rows are measured by.
fn draw_times(root: &Area<'_>, top: i32, seconds: f64) -> anyhow::Result<()> {
    for at in times(seconds) {
        let style = text(14).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(format!("{at:.0} s"), (place(at, seconds), top), style))?;
    }
    Ok(())
}

/// Where a time is, from left to right.
fn place(at: f64, seconds: f64) -> i32 {
    RangedCoordf64::from(0.0..seconds).map(&at, (LEFT, width() - RIGHT))
}

/// A row of colours: who was at which node, and when.
fn strip(root: &Area<'_>, top: i32, name: &str, stays: &[Stay], seconds: f64) -> anyhow::Result<()> {
    let style = text(14).pos(Pos::new(HPos::Right, VPos::Center));
    root.draw(&Text::new(name.to_owned(), (LEFT - 8, top + STRIP / 2), style))?;
    for stay in stays {
        let (from, to) = (place(stay.from, seconds), place(stay.to, seconds));
        let colour = COLOURS.get(stay.node).copied().unwrap_or(INK);
        root.draw(&Rectangle::new([(from, top), (to, top + STRIP)], colour.filled()))?;
        // A name needs its room.
        if to - from > 2 * STRIP {
            let style = text(14).color(&WHITE).pos(Pos::new(HPos::Center, VPos::Center));
            let name = NODES.get(stay.node).copied().unwrap_or_default().to_owned();
            root.draw(&Text::new(name, (i32::midpoint(from, to), top + STRIP / 2), style))?;
        }
    }
    Ok(())
}

fn client(road: Road) -> Vec<Stay> {
    const STEP: Duration = Duration::from_millis(100);
    let mut stays: Vec<Stay> = Vec::new();
    let mut at = Duration::ZERO;
    while at < road.takes {
        let (node, from) = (road.nearest(at), at.as_secs_f64());
        at = (at + STEP).min(road.takes);
        match stays.last_mut() {
            Some(last) if last.node == node => last.to = at.as_secs_f64(),
            _ => stays.push(Stay { node, from, to: at.as_secs_f64() }),
        }
    }
    stays
}

/// A service begins at the first node.
fn service(moves: &[Move], seconds: f64) -> Vec<Stay> {
    let mut stays = vec![Stay { node: 0, from: 0.0, to: seconds }];
    for made in moves {
        let at = made.at.as_secs_f64().min(seconds);
        if let Some(node) = NODES.iter().position(|node| *node == made.to) {
            if let Some(last) = stays.last_mut() {
                last.to = at;
            }
            stays.push(Stay { node, from: at, to: seconds });
        }
    }
    stays
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_where_its_last_move_took_it() {
        let moves = [("b", 10), ("c", 25)];
        let moves = moves.map(|(to, at)| Move { at: Duration::from_secs(at), to: to.to_owned() });
        assert_eq!(
            service(&moves, 60.0),
            [
                Stay { node: 0, from: 0.0, to: 10.0 },
                Stay { node: 1, from: 10.0, to: 25.0 },
                Stay { node: 2, from: 25.0, to: 60.0 }
            ]
        );
        assert_eq!(service(&[], 60.0), [Stay { node: 0, from: 0.0, to: 60.0 }]);
    }

    #[test]
    fn the_client_is_at_one_node_at_each_moment() {
        let stays = client(Road::demo(Duration::from_secs(60)));
        assert!(
            stays
                .windows(2)
                .all(|pair| (pair[0].to - pair[1].from).abs() < 1e-9 && pair[0].node != pair[1].node)
        );
        assert!(stays.first().is_some_and(|first| first.from == 0.0 && first.node == 0));
        assert!(stays.last().is_some_and(|last| (last.to - 60.0).abs() < 1e-9));
    }
}

//! The pictures of what was measured.

use std::path::Path;

use godwit_cli::output;
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::data::Data;
use crate::picture::{BLUE, GREEN, GREY, GRID, INK, ORANGE, PURPLE, SKY, VERMILION, WIDTH, text, title};

type Draw = fn(&Data, &Path) -> anyhow::Result<bool>;

/// Name and drawer of each picture; a drawer says whether there was anything to draw.
pub(super) const ALL: [(&str, Draw); 5] = [
    ("downtime.svg", downtime),
    ("wire.svg", wire),
    ("frozen.svg", frozen),
    ("timeline.svg", timeline),
    ("cutover.svg", cutover),
];

/// The colours of the phases of the frozen time, in their order.
const PHASES: [(&str, RGBColor); 7] = [
    ("rest", GREY),
    ("freeze", SKY),
    ("dump", BLUE),
    ("transfer", ORANGE),
    ("restore", GREEN),
    ("pages", VERMILION),
    ("commit", PURPLE),
];

fn colour(series: &str) -> RGBColor {
    match series.strip_suffix("-return").unwrap_or(series) {
        "godwit-precopy" => BLUE,
        "godwit-postcopy" => GREEN,
        "godwit-hybrid" => PURPLE,
        "godwit-cold" => SKY,
        "stock-cold" => VERMILION,
        "stock-lazy" => ORANGE,
        "floor" | "bare" => GREY,
        _ => BLACK,
    }
}

/// The longest a client waited, by memory: a line for each series, named where it ends.
fn downtime(data: &Data, path: &Path) -> anyhow::Result<bool> {
    // Returns are about bytes, and busy ones about the service: here they would only hide the moves.
    let drawn = |series: &str| !series.ends_with("-return") && !series.ends_with("-busy");
    let here = |memory: &u64| data.groups.iter().any(|group| group.memory == *memory && drawn(&group.series));
    let sizes: Vec<u64> = data.sizes().into_iter().filter(here).collect();
    let lines: Vec<(&str, Vec<(f64, f64)>)> = data
        .series()
        .into_iter()
        .filter(|series| drawn(series))
        .map(|series| {
            let points = (0_u32..).zip(&sizes).filter_map(|(at, memory)| {
                Some((f64::from(at), data.group(series, *memory)?.median("downtime_ms")?))
            });
            (series, points.collect::<Vec<_>>())
        })
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let all = lines.iter().flat_map(|(_, points)| points).map(|(_, ms)| *ms);
    let (low, high) = all.fold((f64::MAX, 0.0_f64), |(low, high), ms| (low.min(ms), high.max(ms)));
    if high <= 0.0 {
        return Ok(false);
    }
    let (low, high) = (low.max(1.0) / 1.3, high * 1.3);
    let (height, names) = (440_u32, 190_u32);
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    title(&root, "Longest wait of a client while Redis moves (median; log scale)")?;
    let (left, _) = root.split_horizontally(WIDTH - names);
    let last = f64::from(u32::try_from(sizes.len()).unwrap_or(1)) - 1.0;
    let mut chart = ChartBuilder::on(&left)
        .margin_top(46)
        .margin_left(6)
        .x_label_area_size(52)
        .y_label_area_size(78)
        .build_cartesian_2d(-0.2..last + 0.12, (low..high).log_scale())?;
    // The ticks are drawn here: sizes of memory are no numbers of the axis.
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(INK)
        .x_labels(0)
        .y_labels(0)
        .y_label_formatter(&|_| String::new())
        .x_desc("data in Redis")
        .y_desc("downtime, ms")
        .axis_desc_style(text(15))
        .draw()?;
    for tick in ticks(low, high) {
        let line = [(-0.2, tick), (last + 0.12, tick)];
        chart.draw_series(LineSeries::new(line, GRID))?;
        let (x, y) = chart.backend_coord(&(-0.2, tick));
        let style = text(15).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(thousands(tick), (x - 8, y), style))?;
    }
    for (at, memory) in (0_u32..).zip(&sizes) {
        let (x, y) = chart.backend_coord(&(f64::from(at), low));
        let style = text(15).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(size(*memory), (x, y + 8), style))?;
    }
    let mut ends = Vec::new();
    for (series, points) in &lines {
        let style = colour(series).stroke_width(if series.starts_with("godwit") { 3 } else { 2 });
        if matches!(*series, "floor" | "bare") {
            chart.draw_series(DashedLineSeries::new(points.iter().copied(), 6, 4, style))?;
        } else {
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        }
        let filled = colour(series).filled();
        if series.starts_with("stock") {
            chart.draw_series(points.iter().map(|point| TriangleMarker::new(*point, 7, filled)))?;
        } else {
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, filled)))?;
        }
        let Some(point) = points.last() else { continue };
        let (x, y) = chart.backend_coord(point);
        if point.0 < last {
            // It has no figure for larger ones: its name is where it ends.
            let style = text(15).pos(Pos::new(HPos::Left, VPos::Center));
            root.draw(&Text::new(format!("{series}  {}", output::millis(point.1)), (x + 12, y), style))?;
        } else {
            ends.push(((x, y), *series, point.1));
        }
    }
    // Names beside the ends, moved apart where they would lie on each other.
    ends.sort_by_key(|((_, y), ..)| *y);
    let step = 20;
    let below = i32::try_from(ends.len()).unwrap_or(0) * step;
    let bottom = i32::try_from(height).unwrap_or(0) - 52;
    let mut free = 46;
    for (index, ((x, y), series, ms)) in (0..).zip(ends) {
        // Those that follow need their room too.
        let at = y.max(free).min(bottom - (below - index * step));
        free = at + step;
        let x_name = i32::try_from(WIDTH - names).unwrap_or(0) + 14;
        root.draw(&PathElement::new(vec![(x + 8, y), (x_name - 5, at)], colour(series).stroke_width(2)))?;
        let style = text(15).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(format!("{series}  {}", output::millis(ms)), (x_name, at), style))?;
    }
    root.present()?;
    Ok(true)
}

/// 1, 2 and 5 of each power of ten between two values.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let powers = (0..8).map(|power| 10_f64.powi(power));
    powers
        .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * power))
        .filter(|tick| (low..=high).contains(tick))
        .collect()
}

/// `12,000`.
fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    match digits.split_at_checked(digits.len().saturating_sub(3)) {
        Some((head, tail)) if !head.is_empty() => format!("{head},{tail}"),
        _ => digits,
    }
}

/// `0.5`, `12,000`.
fn plain(value: f64) -> String {
    if value < 10.0 && value.fract() > 0.001 { format!("{value:.1}") } else { thousands(value) }
}

/// `256 MiB`, without places where there are none.
fn size(bytes: u64) -> String {
    output::bytes(bytes).replace(".0 ", " ")
}

/// One horizontal bar, of one piece or of several.
struct Bar {
    name: String,
    /// Where it begins.
    from: f64,
    pieces: Vec<(RGBColor, f64)>,
    says: String,
}

/// What a picture of bars says around them.
struct Words<'w> {
    title: &'w str,
    axis: &'w str,
    legend: Vec<(&'w str, RGBColor)>,
}

/// Bars under headings; `line` is drawn across all of them.
fn bars(
    path: &Path,
    words: &Words<'_>,
    groups: &[(String, Vec<Bar>)],
    line: Option<f64>,
) -> anyhow::Result<bool> {
    let groups = groups.iter().filter(|(_, bars)| !bars.is_empty()).collect::<Vec<_>>();
    let longest = groups.iter().flat_map(|(_, bars)| bars);
    let longest = longest.map(|bar| bar.from + bar.pieces.iter().map(|(_, length)| length).sum::<f64>());
    let longest = longest.fold(0.0_f64, f64::max).max(line.unwrap_or(0.0));
    let count: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    if count == 0 || longest <= 0.0 {
        return Ok(false);
    }
    // A bar is one unit high, and so is a heading.
    let rows = u32::try_from(count + groups.len()).unwrap_or(1);
    let units = f64::from(rows);
    let legend = if words.legend.is_empty() { 0 } else { 28 };
    let height = 46 + legend + rows * 24 + 56;
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    title(&root, words.title)?;
    let mut x = 160;
    for (name, colour) in &words.legend {
        root.draw(&Rectangle::new([(x, 48), (x + 14, 62)], colour.filled()))?;
        let style = text(15).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new((*name).to_owned(), (x + 20, 55), style))?;
        x += 48 + 8 * i32::try_from(name.len()).unwrap_or(0);
    }
    let mut chart = ChartBuilder::on(&root)
        .margin_top(46 + legend)
        .margin_right(20)
        .x_label_area_size(52)
        .y_label_area_size(160)
        .build_cartesian_2d(0.0..longest * 1.24, 0.0..units)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .x_desc(words.axis)
        .label_style(text(15))
        .axis_desc_style(text(15))
        .x_label_formatter(&|value| plain(*value))
        .draw()?;
    let mut top = units;
    for (heading, bars) in groups {
        let (_, y) = chart.backend_coord(&(0.0, top - 0.55));
        let style = text(15).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw(&Text::new(heading.clone(), (14, y), style))?;
        top -= 1.0;
        for bar in bars {
            let mut from = bar.from;
            for (colour, length) in &bar.pieces {
                let corners = [(from, top - 0.14), (from + length, top - 0.86)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                from += length;
            }
            let (x, y) = chart.backend_coord(&(from, top - 0.5));
            let left = text(14).pos(Pos::new(HPos::Left, VPos::Center));
            let right = text(14).pos(Pos::new(HPos::Right, VPos::Center));
            root.draw(&Text::new(bar.says.clone(), (x + 6, y), left))?;
            root.draw(&Text::new(bar.name.clone(), (152, y), right))?;
            top -= 1.0;
        }
    }
    if let Some(line) = line {
        chart.draw_series(DashedLineSeries::new([(line, 0.0), (line, units)], 6, 4, INK.stroke_width(1)))?;
    }
    root.present()?;
    Ok(true)
}

/// Bytes on the wire for each byte of memory, by size and series.
fn wire(data: &Data, path: &Path) -> anyhow::Result<bool> {
    let groups = data.sizes().into_iter().map(|memory| {
        let here =
            data.groups.iter().filter(|group| group.memory == memory && !group.series.ends_with("-busy"));
        let bars = here.filter_map(|group| {
            let (ratio, bytes) = (group.bytes_ratio(data)?, group.median("wire_bytes")?);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let bytes = output::bytes(bytes as u64);
            let says = format!("{ratio:.2}  ({bytes})");
            Some(Bar {
                name: group.series.clone(),
                from: 0.0,
                pieces: vec![(colour(&group.series), ratio)],
                says,
            })
        });
        (size(memory), bars.collect())
    });
    let words = Words {
        title: "Bytes on the wire (median; the line is all of the memory, once)",
        axis: "bytes sent for each byte of the service's memory",
        legend: Vec::new(),
    };
    bars(path, &words, &groups.collect::<Vec<_>>(), Some(1.0))
}

/// Where the frozen time goes, phase by phase.
fn frozen(data: &Data, path: &Path) -> anyhow::Result<bool> {
    let groups = data.sizes().into_iter().map(|memory| {
        let here =
            data.groups.iter().filter(|group| group.memory == memory && !group.series.ends_with("-busy"));
        let bars = here.filter_map(|group| {
            let phases = group.phases();
            let known = |name: &str| PHASES.iter().find(|(phase, _)| *phase == name);
            let pieces: Vec<_> = phases
                .iter()
                .map(|(name, ms)| (known(name).map_or(BLACK, |(_, colour)| *colour), *ms))
                .collect();
            let total = phases.iter().map(|(_, ms)| ms).sum();
            (!pieces.is_empty()).then(|| Bar {
                name: group.series.clone(),
                from: 0.0,
                pieces,
                says: output::millis(total),
            })
        });
        (size(memory), bars.collect())
    });
    let mut groups: Vec<(String, Vec<Bar>)> = groups.collect();
    // Cold moves stand still for the whole memory: beside them nothing else could be seen.
    for (_, bars) in &mut groups {
        if bars.iter().any(|bar| !bar.name.contains("cold")) {
            bars.retain(|bar| !bar.name.contains("cold"));
        }
    }
    let words = Words {
        title: "Where the frozen time goes (medians)",
        axis: "frozen time, ms",
        legend: PHASES.to_vec(),
    };
    bars(path, &words, &groups, None)
}

/// What both nodes did in the frozen time of the usual run of each series: the one whose frozen time is the median.
pub(super) fn timeline(data: &Data, path: &Path) -> anyhow::Result<bool> {
    const SOURCE: RGBColor = BLUE;
    const DESTINATION: RGBColor = VERMILION;
    let is_told = |series: &str| !series.ends_with("-return") && !series.ends_with("-busy");
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for group in data.groups.iter().filter(|group| is_told(&group.series)) {
        let Some(usual) = group.usual("frozen_ms") else { continue };
        let (source, frozen) = (usual["source"].as_str(), usual["frozen_ms"].as_f64().unwrap_or(0.0));
        let spans = usual["timeline"].as_array().into_iter().flatten();
        let bars = spans.filter_map(|span| {
            let (from, length) = (span["start_ms"].as_f64()?, span["ms"].as_f64()?);
            // What had begun before the freeze.
            let length = length + from.min(0.0);
            let colour = if span["node"].as_str() == source { SOURCE } else { DESTINATION };
            Some(Bar {
                name: span["what"].as_str()?.to_owned(),
                from: from.max(0.0),
                pieces: vec![(colour, length)],
                says: output::millis(length),
            })
        });
        let heading = format!("{}, {}: {} frozen", group.series, size(group.memory), output::millis(frozen));
        groups.push((heading, bars.collect()));
    }
    let words = Words {
        title: "What both nodes do in the frozen time (the run with the median)",
        axis: "since the freeze, ms",
        legend: vec![("source", SOURCE), ("destination", DESTINATION)],
    };
    bars(path, &words, &groups, None)
}

/// What a client waits in a pause whose frames are held, and dropped.
fn cutover(data: &Data, path: &Path) -> anyhow::Result<bool> {
    const FROZEN: RGBColor = BLUE;
    const BEYOND: RGBColor = VERMILION;
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for cutover in data.cutovers.iter().filter(|cutover| cutover.pause_ms == 0) {
        let (Some(downtime), Some(frozen)) = (cutover.median("downtime_ms"), cutover.median("frozen_ms"))
        else {
            continue;
        };
        let says = match cutover.most("timeouts") {
            Some(0) | None => output::millis(downtime),
            Some(1) => format!("{}, 1 time-out", output::millis(downtime)),
            Some(most) => format!("{}, {most} time-outs", output::millis(downtime)),
        };
        // A client that asks within the pause waits for less than all of it.
        let pieces = vec![(FROZEN, frozen.min(downtime)), (BEYOND, (downtime - frozen).max(0.0))];
        let name = if cutover.frames == "hold" { "held" } else { "dropped" }.to_owned();
        let bar = Bar { name, from: 0.0, pieces, says };
        match groups.last_mut() {
            Some((load, bars)) if *load == cutover.name() => bars.push(bar),
            _ => groups.push((cutover.name(), vec![bar])),
        }
    }
    if groups.iter().any(|(_, bars)| bars.len() > 1) {
        // Loads of which only one was measured compare nothing.
        groups.retain(|(_, bars)| bars.len() > 1);
    }
    let words = Words {
        title: "Downtime when frames are held in the pause, and when they are dropped (medians)",
        axis: "downtime, ms",
        legend: vec![("frozen", FROZEN), ("beyond it", BEYOND)],
    };
    bars(path, &words, &groups, None)
}

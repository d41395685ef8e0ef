//! How far the frozen times of past moves from this node were from what was foreseen: by that the next one is corrected
//! ([`godwit_policy::learn`]). They are in a file of the node's state, whose loss costs nothing but the corrections.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_policy::learn::{Belief, Past};
use serde::{Deserialize, Serialize};

use crate::journal::now_ms;

/// Of so many services and destinations something is known at most.
const MOST: usize = 4096;

/// Largest file that is read, bytes: of so many with the longest names.
const LARGEST: u64 = 4 << 20;

/// What counts for less of a move is forgotten: seven weeks after it.
const LEAST: f64 = 1.0 / 128.0;

/// A destination and a service's id; nothing for all destinations, or all services.
type Level = (String, String);

/// The errors of past moves from this node.
#[derive(Debug)]
pub struct PastMoves {
    file: PathBuf,
    levels: Mutex<HashMap<Level, Noted>>,
    /// Whoever writes the file. Who reads what is believed does not wait for the disk.
    writing: Mutex<()>,
}

/// The past of a level, as it was at a time.
#[derive(Debug, Clone, Copy)]
struct Noted {
    past: Past,
    at_ms: i64,
}

impl Noted {
    fn at(&self, now_ms: i64) -> Past {
        // A clock that was set back makes nothing younger.
        let since = u64::try_from(now_ms.saturating_sub(self.at_ms)).unwrap_or(0);
        self.past.faded(Duration::from_millis(since))
    }
}

/// A level as it is in the file.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    destination: String,
    service: String,
    weight: f64,
    sum: f64,
    squares: f64,
    at_ms: i64,
}

impl PastMoves {
    /// Those that an earlier life of this daemon noted in a file. One that cannot be read, or is damaged, is as good as none.
    #[must_use]
    pub fn open(file: &Path) -> Self {
        let levels = match read(file) {
            Ok(levels) => levels,
            Err(error) if error.kind() == ErrorKind::NotFound => HashMap::new(),
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "what past moves took is not known any more; predictions are as on a new node");
                HashMap::new()
            }
        };
        Self { file: file.to_owned(), levels: Mutex::new(levels), writing: Mutex::new(()) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Level, Noted>> {
        // Nothing can panic while the map is changed.
        self.levels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is believed of the next move of a service to a node.
    #[must_use]
    pub fn belief(&self, destination: &str, service: &str) -> Belief {
        believed(&self.lock(), &above(destination, service), now_ms())
    }

    /// Notes a move. Blocks. What cannot be written is known as long as this daemon lives.
    pub fn learn(&self, (destination, service): (&str, &str), foreseen: Duration, measured: Duration) {
        let (now, its) = (now_ms(), above(destination, service));
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut levels = self.lock();
        let error = believed(&levels, &its, now).error(foreseen, measured);
        for level in its {
            let past = past_of(&levels, &level, now).with(error);
            levels.insert(level, Noted { past, at_ms: now });
        }
        levels.retain(|_, noted| noted.at(now).weight >= LEAST);
        while levels.len() > MOST {
            let oldest = levels.iter().min_by_key(|(_, noted)| noted.at_ms).map(|(level, _)| level.clone());
            let Some(oldest) = oldest else { break };
            levels.remove(&oldest);
        }
        let noted = levels.clone();
        drop(levels);
        if let Err(error) = write(&self.file, &noted) {
            tracing::warn!(file = %self.file.display(), %error, "what this move took is forgotten when godwitd ends");
        }
    }
}

/// A level and those above it, the highest first.
fn above(destination: &str, service: &str) -> [Level; 3] {
    [("", ""), (destination, ""), (destination, service)]
        .map(|(destination, service)| (destination.to_owned(), service.to_owned()))
}

fn past_of(levels: &HashMap<Level, Noted>, level: &Level, now_ms: i64) -> Past {
    levels.get(level).map_or_else(Past::default, |noted| noted.at(now_ms))
}

/// What these levels say, each of those above without what is of the one below.
fn believed(levels: &HashMap<Level, Noted>, its: &[Level; 3], now_ms: i64) -> Belief {
    let [all, way, service] = its.each_ref().map(|level| past_of(levels, level, now_ms));
    [all.without(way), way.without(service), service].into_iter().fold(Belief::default(), Belief::given)
}

fn read(file: &Path) -> io::Result<HashMap<Level, Noted>> {
    let mut text = Vec::new();
    File::open(file)?.take(LARGEST).read_to_end(&mut text)?;
    let (lines, now): (Vec<Line>, _) = (serde_json::from_slice(&text)?, now_ms());
    let noted = |Line { destination, service, weight, sum, squares, at_ms }| {
        let past = Past { weight, sum, squares };
        // A clock that was ahead makes nothing last.
        let at_ms = at_ms.min(now);
        past.is_sound().then_some(((destination, service), Noted { past, at_ms }))
    };
    let unsound = || io::Error::new(ErrorKind::InvalidData, "it has numbers that no move makes");
    lines.into_iter().map(noted).collect::<Option<_>>().ok_or_else(unsound)
}

fn write(file: &Path, levels: &HashMap<Level, Noted>) -> io::Result<()> {
    let lines = levels.iter().map(|((destination, service), Noted { past, at_ms })| {
        let (destination, service) = (destination.clone(), service.clone());
        let Past { weight, sum, squares } = *past;
        Line { destination, service, weight, sum, squares, at_ms: *at_ms }
    });
    let text = serde_json::to_vec(&lines.collect::<Vec<_>>())?;
    // In place of the old one as a whole.
    let new = file.with_extension("new");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).open(&new)?.write_all(&text)?;
    fs::rename(&new, file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FORESEEN: Duration = Duration::from_millis(100);

    fn ms(belief: Belief) -> u128 {
        belief.expected(FORESEEN).as_millis()
    }

    #[test]
    fn what_moves_took_is_believed_of_others_until_they_have_moved_and_is_known_to_the_next_life() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("past_moves.json");
        let past = PastMoves::open(&file);
        let learn =
            |to, service, measured| (0..5).for_each(|_| past.learn((to, service), FORESEEN, measured));
        let of = |past: &PastMoves| {
            [("b", "quick"), ("b", "slow"), ("c", "quick")].map(|(to, service)| ms(past.belief(to, service)))
        };
        let new = of(&past);
        learn("b", "quick", FORESEEN / 4);
        let [quick, slow, elsewhere] = of(&past);
        assert!(quick == slow && slow == elsewhere && quick < new[0], "{quick} {slow} {elsewhere} {new:?}");
        learn("b", "slow", FORESEEN * 2);
        let [quick, slow, elsewhere] = of(&past);
        assert!(quick < elsewhere && elsewhere < slow, "{quick} {slow} {elsewhere}");
        assert_eq!(of(&PastMoves::open(&file)), [quick, slow, elsewhere]);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_damaged_is_as_good_as_none() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("past_moves.json");
        let new = ms(PastMoves::open(&file).belief("b", "web"));
        let line = |weight: &str| {
            format!(
                r#"[{{"destination":"","service":"","weight":{weight},"sum":-1.0,"squares":1.0,"at_ms":0}}]"#
            )
        };
        for text in ["", "[", "{}", &line("-1.0"), &line("1e999"), &line("0.1")] {
            fs::write(&file, text).unwrap();
            let past = PastMoves::open(&file);
            assert_eq!(ms(past.belief("b", "web")), new, "{text}");
            past.learn(("b", "web"), FORESEEN, FORESEEN / 4);
            assert!(ms(PastMoves::open(&file).belief("b", "web")) < new, "{text}");
        }
    }

    #[test]
    fn no_more_is_noted_than_fits() {
        let scratch = tempfile::tempdir().unwrap();
        let past = PastMoves::open(&scratch.path().join("past_moves.json"));
        let one = Past::default().with(0.0);
        for n in 0..MOST {
            past.lock().insert((format!("{n}"), String::new()), Noted { past: one, at_ms: now_ms() - 1000 });
        }
        past.learn(("b", "web"), FORESEEN, FORESEEN / 4);
        assert_eq!(past.lock().len(), MOST);
        assert!(past.lock().contains_key(&("b".to_owned(), "web".to_owned())));
        // What is too long ago is forgotten.
        past.lock().values_mut().for_each(|noted| noted.at_ms -= 60 * 24 * 3_600_000);
        past.learn(("c", "web"), FORESEEN, FORESEEN / 4);
        assert_eq!(past.lock().len(), 3);
    }
}

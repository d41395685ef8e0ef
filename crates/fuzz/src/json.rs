//! JSON of another node, changed by the fuzzer's bytes.

use arbitrary::Arbitrary;
use serde_json::Value;

/// What is changed of a usual document.
#[derive(Debug, Arbitrary)]
pub struct Input<'a> {
    changes: Vec<(Vec<u8>, Change<'a>)>,
}

#[derive(Debug, Arbitrary)]
enum Change<'a> {
    /// To some JSON.
    Json(&'a str),
    Text(&'a str),
    Flag(bool),
    /// One more key of an object, or the same in another case.
    Key(&'a str, &'a str),
    More(&'a str),
    Gone,
}

impl Input<'_> {
    /// Changes a document.
    pub fn change(&self, document: &mut Value) {
        for (steps, changed) in self.changes.iter().take(16) {
            change(at(document, steps), changed);
        }
    }
}

/// What these steps lead to.
fn at<'a>(mut value: &'a mut Value, steps: &[u8]) -> &'a mut Value {
    for step in steps.iter().take(8) {
        let length = match &*value {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            _ => 0,
        };
        if length == 0 {
            break;
        }
        let nth = usize::from(*step) % length;
        value = match value {
            Value::Array(list) => &mut list[nth],
            Value::Object(map) => map.values_mut().nth(nth).expect("one of them"),
            _ => unreachable!("it has none"),
        };
    }
    value
}

fn change(value: &mut Value, change: &Change<'_>) {
    let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
    match change {
        Change::Json(text) => *value = json(text),
        Change::Text(text) => *value = (*text).into(),
        Change::Flag(flag) => *value = (*flag).into(),
        Change::Key(key, content) => {
            if let Some(map) = value.as_object_mut() {
                map.insert((*key).to_owned(), json(content));
            }
        }
        Change::More(text) => {
            if let Some(list) = value.as_array_mut() {
                list.push(json(text));
            }
        }
        Change::Gone => *value = Value::Null,
    }
}

//! Programs of floating point: functions of random expressions over `float`, `double` and `long double` with loops,
//! arrays, conditions, recursion and calls of each other, whose results are printed as bits.
//!
//! A NaN is printed as such, since its sign and payload are the processor's. Numbers become integers through a function
//! that keeps them within range.

use std::fmt::Write as _;

use crate::random::Random;

const PROLOGUE: &str = r#"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef float f32;
typedef double f64;
typedef long double f128;

static void show_f32(int number, f32 v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    if (v != v)
        printf("%d nan\n", number);
    else
        printf("%d %08x\n", number, bits);
}
static void show_f64(int number, f64 v) {
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    if (v != v)
        printf("%d nan\n", number);
    else
        printf("%d %016llx\n", number, (unsigned long long)bits);
}
static void show_f128(int number, f128 v) {
    uint64_t bits[2];
    memcpy(bits, &v, sizeof bits);
    if (v != v)
        printf("%d nan\n", number);
    else
        printf("%d %016llx%016llx\n", number, (unsigned long long)bits[1], (unsigned long long)bits[0]);
}
__attribute__((unused)) static int64_t whole(f64 v) { return v > -1e15 && v < 1e15 ? (int64_t)v : 7; }
__attribute__((unused)) static f64 tame(f64 v) { return v > -1e30 && v < 1e30 ? v : 1.5; }
__attribute__((unused)) static f64 root(f64 v) { return sqrt(fabs(v)); }
"#;

const REALS: [&str; 3] = ["f32", "f64", "f128"];

struct Writer {
    random: Random,
    text: String,
    /// The result types of the functions so far.
    functions: Vec<usize>,
}

impl Writer {
    fn constant(&mut self) -> String {
        let random = &mut self.random;
        match random.below(5) {
            0 => format!("{}", random.between(1, 9)),
            1 => format!("{}.{:03}", random.below(100), random.below(1000)),
            2 => format!("{}.5e-{}", random.between(1, 9), random.between(1, 20)),
            3 => format!("0x1.{:x}p{}", random.below(0xffff), random.between(0, 6)),
            _ => format!("(1.0 / {})", random.between(3, 97)),
        }
    }

    /// An expression over the variables `a`, `b`, `c`, `x[]` and the integer `i`; calls only where `depth` allows.
    fn expression(&mut self, depth: usize) -> String {
        if depth == 0 {
            return match self.random.below(4) {
                0 => self.constant(),
                1 => "x[i & 7]".to_owned(),
                2 => "(f64)(i + 1)".to_owned(),
                _ => (*self.random.pick(&["a", "b", "c"])).to_owned(),
            };
        }
        let left = self.expression(depth - 1);
        let less = self.random.below(depth);
        let right = self.expression(less);
        match self.random.below(10) {
            0 | 1 => format!("({left} + {right})"),
            2 => format!("({left} - {right})"),
            3 | 4 => format!("({left} * {right})"),
            5 => format!("({left} / {right})"),
            6 => format!("({left} < {right} ? {right} * 0.5 : {left} - 1)"),
            7 => format!("({})root((f64)({left}))", self.random.pick(&REALS)),
            8 => format!("({})({left})", self.random.pick(&REALS)),
            _ => format!("(f64)(whole((f64)({left})) % {})", self.random.between(2, 999)),
        }
    }

    fn function(&mut self, number: usize) {
        let result = self.random.below(REALS.len());
        let (kind, first, second, third) =
            (REALS[result], *self.random.pick(&REALS), *self.random.pick(&REALS), *self.random.pick(&REALS));
        let _ = writeln!(
            self.text,
            "\n__attribute__((noinline)) static {kind} function{number}(int depth, {first} a, {second} b, {third} c) {{"
        );
        let _ = writeln!(self.text, "    {} x[8] = {{1, 2, 3, 5, 8, 13, 21, 34}};", self.random.pick(&REALS));
        let _ = writeln!(self.text, "    {kind} sum = 0;");
        let _ = writeln!(self.text, "    for (int i = 0; i < {}; i++) {{", self.random.between(2, 12));
        for _ in 0..self.random.between(1, 4) {
            let depth = self.random.between(1, 4);
            let value = self.expression(depth);
            let _ = match self.random.below(5) {
                0 => writeln!(
                    self.text,
                    "        x[(i + {}) & 7] = tame((f64)({value}));",
                    self.random.below(8)
                ),
                1 => writeln!(self.text, "        a = ({first})tame((f64)({value}));"),
                2 => writeln!(self.text, "        b = ({second})tame((f64)({value}));"),
                3 => {
                    writeln!(self.text, "        if (c > a)\n            c = ({third})tame((f64)({value}));")
                }
                _ => writeln!(self.text, "        sum += ({kind})({value});"),
            };
        }
        if number > 0 && self.random.below(2) == 0 {
            let other = self.random.below(number);
            let _ = writeln!(
                self.text,
                "        if (depth > 0)\n            sum += ({kind})function{other}(depth - 1, (f32)a, (f64)b, (f64)c);"
            );
        }
        self.text.push_str("        sum *= 0.75;\n    }\n");
        if self.random.below(3) == 0 {
            let _ = writeln!(
                self.text,
                "    if (depth > 0)\n        sum -= function{number}(depth - 1, a * 0.5f, b + 1, c) / 3;"
            );
        }
        let _ = writeln!(self.text, "    return sum + ({kind})x[{}];\n}}", self.random.below(8));
        self.functions.push(result);
    }
}

/// The program of a seed.
pub(crate) fn program(seed: u64) -> String {
    let text = format!("// Floating point, seed {seed}.{PROLOGUE}");
    let mut writer = Writer { random: Random::new(seed), text, functions: Vec::new() };
    for number in 0..writer.random.between(3, 9) {
        writer.function(number);
    }
    let _ = writeln!(writer.text, "\nint main(void) {{");
    let _ = writeln!(writer.text, "    for (int i = 0; i < {}; i++) {{", writer.random.between(2, 8));
    for number in 0..writer.functions.len() {
        let kind = REALS[writer.functions[number]];
        let (a, b, c) = (writer.constant(), writer.constant(), writer.constant());
        let _ = writeln!(
            writer.text,
            "        show_{kind}({number}, function{number}(2, (f32)({a} + i), (f64)({b} * i), (f64)({c} - i)));"
        );
    }
    // All three are used, whichever types the functions have.
    for kind in REALS {
        let _ = writeln!(writer.text, "        show_{kind}(-1, ({kind})i / 3);");
    }
    writer.text.push_str("    }\n    return 0;\n}\n");
    writer.text
}

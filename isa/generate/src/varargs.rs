//! Programs full of variable arguments: functions that read a fixed list of types by `va_arg`, some of them with a copy
//! of the list that is read again, some that pass the list on in the middle, called with values computed at run time.

use std::fmt::Write as _;

use crate::random::Random;

/// The types of an argument.
const TYPES: [&str; 13] = [
    "int",
    "unsigned",
    "long",
    "double",
    "long double",
    "__int128",
    "const char *",
    "struct small",
    "struct floats",
    "struct mixed",
    "struct pair",
    "struct large",
    "vector",
];

const PROLOGUE: &str = r#"
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct small { short a; char b; };
struct floats { float x, y, z; };
struct mixed { double d; int i; };
struct pair { uint64_t a, b; };
struct large { uint64_t words[3]; double d; };
typedef int vector __attribute__((vector_size(16)));

static uint64_t state, hash;

static uint64_t next(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}
__attribute__((unused)) static double real(void) { return (double)(int64_t)next() * 0x1p-40; }
__attribute__((unused)) static const char *text(void) {
    static const char *const all[] = {"godwit", "curlew", "", "a longer text with words", "plover"};
    return all[next() % 5];
}
static void mix(const void *bytes, size_t size) {
    const unsigned char *b = bytes;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ b[i]) * 0x100000001b3U;
}
"#;

/// How a value `v` of a type goes into the hash, without its padding.
fn mix(name: &str) -> &'static str {
    match name {
        "const char *" => "mix(v, strlen(v));",
        "struct small" => "mix(&v.a, sizeof v.a); mix(&v.b, 1);",
        "struct mixed" => "mix(&v.d, sizeof v.d); mix(&v.i, sizeof v.i);",
        _ => "mix(&v, sizeof v);",
    }
}

fn take(program: &mut String, list: &str, name: &str) {
    let _ = writeln!(program, "    {{ {name} v = va_arg({list}, {name}); {} }}", mix(name));
}

/// The program of a seed.
pub(crate) fn program(seed: u64) -> String {
    let mut random = Random::new(seed);
    let mut program = format!("// Variable arguments, seed {seed}.{PROLOGUE}");
    let functions = random.between(4, 10);
    let mut signatures: Vec<Vec<usize>> = Vec::new();
    for number in 0..functions {
        let types: Vec<usize> = (0..random.between(1, 16)).map(|_| random.below(TYPES.len())).collect();
        let middle = random.below(types.len() + 1);
        let split = random.below(2) == 0;
        let copied = random.below(3) == 0;
        if split {
            let _ =
                writeln!(program, "\n__attribute__((noinline)) static void rest{number}(va_list list) {{");
            for &one in &types[middle..] {
                take(&mut program, "list", TYPES[one]);
            }
            if middle == types.len() {
                program.push_str("    (void)list;\n");
            }
            program.push_str("}\n");
        }
        let _ = writeln!(
            program,
            "\n__attribute__((noinline)) static void function{number}(double before, int last, ...) {{\n    \
             va_list list;\n    mix(&before, sizeof before);\n    va_start(list, last);"
        );
        for &one in &types[..middle] {
            take(&mut program, "list", TYPES[one]);
        }
        if copied {
            program.push_str("    va_list copy;\n    va_copy(copy, list);\n");
        }
        if split {
            let _ = writeln!(program, "    rest{number}(list);");
        } else {
            for &one in &types[middle..] {
                take(&mut program, "list", TYPES[one]);
            }
        }
        if copied {
            for &one in &types[middle..] {
                take(&mut program, "copy", TYPES[one]);
            }
            program.push_str("    va_end(copy);\n");
        }
        program.push_str("    va_end(list);\n");
        // A call of an earlier function from within, sometimes, while this one's list is gone but its frame is not.
        if number > 0 && random.below(2) == 0 {
            program.push_str("    if (last > 0)\n");
            call(&mut program, &mut random, number - 1, &signatures[number - 1], "last - 1");
        }
        program.push_str("    mix(&last, sizeof last);\n}\n");
        signatures.push(types);
    }
    let _ = writeln!(program, "\nint main(void) {{\n    state = {seed}U;");
    let _ = writeln!(program, "    for (int round = 0; round < {}; round++) {{", random.between(3, 20));
    for (number, types) in signatures.iter().enumerate() {
        call(&mut program, &mut random, number, types, "round % 3");
        let _ = writeln!(program, "        printf(\"{number} %016llx\\n\", (unsigned long long)hash);");
    }
    program.push_str("    }\n    return 0;\n}\n");
    program
}

/// A call whose arguments are computed in order before it, since C does not say in which order arguments are.
fn call(program: &mut String, random: &mut Random, number: usize, types: &[usize], last: &str) {
    let _ = writeln!(program, "    {{");
    for (place, &one) in types.iter().enumerate() {
        let name = TYPES[one];
        // An initialiser's own parts are in an order that C leaves open as well, so each value is made by statements.
        let _ = writeln!(program, "        {name} v{place};");
        let _ = writeln!(program, "        {}", initialise(&format!("v{place}"), one));
    }
    let fraction = random.below(1000);
    let _ = write!(program, "        function{number}({fraction}.25, {last}");
    for place in 0..types.len() {
        let _ = write!(program, ", v{place}");
    }
    let _ = writeln!(program, ");\n    }}");
}

fn initialise(variable: &str, one: usize) -> String {
    let v = variable;
    match TYPES[one] {
        "struct small" => format!("{v}.a = (short)next(); {v}.b = (char)next();"),
        "struct floats" => format!("{v}.x = (float)real(); {v}.y = (float)real(); {v}.z = (float)real();"),
        "struct mixed" => format!("{v}.d = real(); {v}.i = (int)next();"),
        "struct pair" => format!("{v}.a = next(); {v}.b = next();"),
        "struct large" => format!("for (int i = 0; i < 3; i++) {{ {v}.words[i] = next(); }} {v}.d = real();"),
        "vector" => format!("for (int i = 0; i < 4; i++) {v}[i] = (int)next();"),
        "__int128" => format!("{v} = (__int128)next() << 32; {v} ^= next();"),
        "double" => format!("{v} = real();"),
        "long double" => format!("{v} = (long double)real() / 3;"),
        "const char *" => format!("{v} = text();"),
        integer => format!("{v} = ({integer})next();"),
    }
}

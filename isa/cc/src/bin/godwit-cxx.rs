//! The program `godwit-cxx`: see the crate's documentation.

fn main() -> std::process::ExitCode {
    godwit_cc::main(godwit_cc::Tool::CxxCompiler)
}

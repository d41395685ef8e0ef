//! `godwit`: the user's command. All of it is in the library beside this file.

fn main() -> std::process::ExitCode {
    godwit_cli::godwit()
}

//! `godwit-exec`: the parent of a command that somebody runs on a terminal in a container, and the holder of the terminal.
//!
//! ```text
//!   runc exec ─▶ /proc/self/fd/3 ─fork─▶ godwit-exec ─fork─▶ the command, on the terminal
//!                (ends)                  a child of the container's first process
//! ```
//! `/proc/self/fd/3 ROWS COLUMNS COMMAND ARGS…`, with this program open as 3 and a stream socket to godwitd as 4.
//!
//! So the command, its terminal and this program are part of the container's process tree, and move with it: CRIU dumps
//! both ends of the terminal and of both pipes, since all of them are open here. godwitd takes copies of [`MASTER`],
//! [`ORDERS_IN`] and [`NEWS_OUT`] by pidfd_getfd(2), at each node anew; nothing here knows of nodes.
//!
//! It runs in every image: it needs no library, and no file that is in the image. It has what the command has of users and
//! rights, and no more.
//!
//! On the socket it says once how the start went, 0 or the errno as four bytes, and waits for a byte. It hangs up where
//! that does not come, where godwitd orders it, and where no order has come for half a minute: then no godwitd has the
//! terminal any more. When the command has ended, its wait status goes into the pipe of news, as four bytes.

#![no_std]
#![no_main]
#![no_builtins]

use core::arch::{asm, global_asm};

/// The program itself.
const PROGRAM: i32 = 3;
/// The socket to godwitd.
const SOCKET: i32 = 4;
/// The terminal's end at which a user sits.
const MASTER: i32 = 5;
/// Orders of godwitd: [`BEAT`], [`QUIT`].
const ORDERS: i32 = 6;
/// The end of it that godwitd writes to.
const ORDERS_IN: i32 = 7;
/// The end of the news that godwitd reads.
const NEWS_OUT: i32 = 8;
/// How the command has ended.
const NEWS: i32 = 9;
/// Ends of children.
const SIGNALS: i32 = 10;
/// How the command's start went; not open for longer.
const START: i32 = 11;
/// The first number that is no descriptor of the above.
const FREE: i32 = 12;

/// The user is still there.
const BEAT: u8 = b'b';
/// The user has gone, or knows the end.
const QUIT: u8 = b'q';

/// So many silences of [`SILENCE`] seconds, and no godwitd has the terminal any more. Counted, as a service that was frozen
/// or moved finds its time-outs passed.
const SILENCES: u32 = 3;
const SILENCE: i64 = 10;

/// Longest path of a command.
const LONGEST_PATH: usize = 4096;

#[cfg(target_arch = "x86_64")]
mod number {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const IOCTL: usize = 16;
    pub const CLONE: usize = 56;
    pub const EXECVE: usize = 59;
    pub const EXIT_GROUP: usize = 231;
    pub const WAIT4: usize = 61;
    pub const SETSID: usize = 112;
    pub const PRCTL: usize = 157;
    pub const OPENAT: usize = 257;
    pub const PPOLL: usize = 271;
    pub const SIGNALFD4: usize = 289;
    pub const DUP3: usize = 292;
    pub const PIPE2: usize = 293;
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const CLOSE: usize = 57;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const IOCTL: usize = 29;
    pub const CLONE: usize = 220;
    pub const EXECVE: usize = 221;
    pub const EXIT_GROUP: usize = 94;
    pub const WAIT4: usize = 260;
    pub const SETSID: usize = 157;
    pub const PRCTL: usize = 167;
    pub const OPENAT: usize = 56;
    pub const PPOLL: usize = 73;
    pub const SIGNALFD4: usize = 74;
    pub const DUP3: usize = 24;
    pub const PIPE2: usize = 59;
}

const AT_FDCWD: usize = -100_isize as usize;
const O_RDWR: usize = 0o2;
const O_NOCTTY: usize = 0o400;
const O_CLOEXEC: usize = 0o2_000_000;
const TIOCSCTTY: usize = 0x540E;
const TIOCSWINSZ: usize = 0x5414;
const TIOCGPTN: usize = 0x8004_5430;
const TIOCSPTLCK: usize = 0x4004_5431;
const SIGCHLD: usize = 17;
const SIG_BLOCK: usize = 0;
const SIG_UNBLOCK: usize = 1;
const PR_SET_NAME: usize = 15;
const WNOHANG: usize = 1;
const POLLIN: i16 = 1;
const ENOENT: i32 = 2;
const EINTR: i32 = 4;
const EACCES: i32 = 13;
const ENOTDIR: i32 = 20;
const ENAMETOOLONG: i32 = 36;

#[cfg(target_arch = "x86_64")]
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "mov rdi, rsp", "and rsp, -16", "call {main}", "ud2", main = sym begin);

#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x29, #0", "mov x30, #0", "mov x0, sp", "bl {main}", "brk #1", main = sym begin);

/// A system call; an errno as an error.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn call(number: usize, arguments: [usize; 6]) -> Result<usize, i32> {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel changes what is named here alone.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") first, in("rsi") second, in("rdx") third,
            in("r10") fourth, in("r8") fifth, in("r9") sixth, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel changes what is named here alone.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") first => result, in("x1") second, in("x2") third,
            in("x3") fourth, in("x4") fifth, in("x5") sixth, options(nostack));
    }
    if result < 0 { Err(-result as i32) } else { Ok(result as usize) }
}

fn close(descriptor: i32) {
    // SAFETY: no memory is involved.
    let _ = unsafe { call(number::CLOSE, [descriptor as usize, 0, 0, 0, 0, 0]) };
}

fn read(descriptor: i32, buffer: &mut [u8]) -> Result<usize, i32> {
    loop {
        // SAFETY: the buffer is as long as is said.
        let arguments = [descriptor as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0];
        match unsafe { call(number::READ, arguments) } {
            Err(EINTR) => {}
            result => return result,
        }
    }
}

fn write(descriptor: i32, data: &[u8]) {
    // What is written fits into an empty pipe or socket. Who reads may have gone.
    // SAFETY: the data are as long as is said.
    let _ = unsafe { call(number::WRITE, [descriptor as usize, data.as_ptr() as usize, data.len(), 0, 0, 0]) };
}

fn ioctl(descriptor: i32, request: usize, argument: usize) -> Result<usize, i32> {
    // SAFETY: the callers' arguments are those of the request.
    unsafe { call(number::IOCTL, [descriptor as usize, request, argument, 0, 0, 0]) }
}

/// Opens a path that ends with a NUL.
fn open(path: &[u8], flags: usize) -> Result<i32, i32> {
    // SAFETY: the path ends with a NUL.
    unsafe { call(number::OPENAT, [AT_FDCWD, path.as_ptr() as usize, flags, 0, 0, 0]) }.map(|fd| fd as i32)
}

/// Gives a descriptor its number.
fn put(descriptor: i32, at: i32, flags: usize) -> Result<(), i32> {
    // SAFETY: no memory is involved.
    unsafe { call(number::DUP3, [descriptor as usize, at as usize, flags, 0, 0, 0]) }?;
    close(descriptor);
    Ok(())
}

/// A pipe at two numbers, for reading and for writing, closed at an execve(2).
fn pipe(out: i32, into: i32) -> Result<(), i32> {
    let mut ends = [0_i32; 2];
    // SAFETY: there is space for two numbers.
    unsafe { call(number::PIPE2, [ends.as_mut_ptr() as usize, O_CLOEXEC, 0, 0, 0, 0]) }?;
    // They are above all fixed numbers: see `begin`.
    put(ends[0], out, O_CLOEXEC)?;
    put(ends[1], into, O_CLOEXEC)
}

fn fork() -> Result<usize, i32> {
    // SAFETY: one thread, which goes on with its own memory in both.
    unsafe { call(number::CLONE, [SIGCHLD, 0, 0, 0, 0, 0]) }
}

fn exit(code: usize) -> ! {
    loop {
        // SAFETY: it does not return.
        let _ = unsafe { call(number::EXIT_GROUP, [code, 0, 0, 0, 0, 0]) };
    }
}

fn set_session() -> Result<usize, i32> {
    // SAFETY: no memory is involved.
    unsafe { call(number::SETSID, [0; 6]) }
}

/// Blocks the ends of children, or lets them come.
fn mask(how: usize) {
    let children: u64 = 1 << (SIGCHLD - 1);
    // SAFETY: the mask is as long as is said.
    let _ = unsafe { call(number::RT_SIGPROCMASK, [how, &raw const children as usize, 0, 8, 0, 0]) };
}

type Words = *const *const u8;

/// What the program was started with.
struct Arguments {
    rows: u16,
    columns: u16,
    command: Words,
    environment: Words,
}

/// # Safety
/// A string of the kernel's, which ends with a NUL.
unsafe fn text<'a>(start: *const u8) -> &'a [u8] {
    let mut length = 0;
    // SAFETY: it ends with a NUL.
    unsafe {
        while *start.add(length) != 0 {
            length += 1;
        }
        core::slice::from_raw_parts(start, length)
    }
}

fn decimal(text: &[u8]) -> u16 {
    text.iter().fold(0, |value: u16, digit| value.wrapping_mul(10).wrapping_add(u16::from(digit.wrapping_sub(b'0'))))
}

extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the stack of a program that begins (System V ABI): a count, the arguments, a null, the environment, a null.
    let (count, words) = unsafe { (*stack, stack.add(1).cast::<*const u8>()) };
    if count < 4 {
        exit(2);
    }
    // SAFETY: there are as many.
    let arguments = unsafe {
        Arguments {
            rows: decimal(text(*words.add(1))),
            columns: decimal(text(*words.add(2))),
            command: words.add(3),
            environment: words.add(count + 1),
        }
    };
    match fork() {
        Ok(0) => {}
        Ok(_) => exit(0),
        Err(errno) => fail(errno),
    }
    let command = match start(&arguments) {
        Ok(command) => command,
        Err(errno) => fail(errno),
    };
    write(SOCKET, &0_i32.to_ne_bytes());
    let is_taken = matches!(read(SOCKET, &mut [0]), Ok(1));
    close(SOCKET);
    // SAFETY: the words of the arguments lie one after the other, and are this program's own to change.
    unsafe { hide(words, count) };
    attend(command, is_taken)
}

fn fail(errno: i32) -> ! {
    write(SOCKET, &errno.to_ne_bytes());
    exit(1)
}

/// In place of the command's words, which others may read for as long as this program runs, its own name.
///
/// # Safety
/// So many words of the kernel's, one after the other.
unsafe fn hide(words: Words, count: usize) {
    let name = b"godwit-exec\0";
    // SAFETY: by the caller.
    unsafe {
        let (first, last) = (*words, *words.add(count - 1));
        let end = last.add(text(last).len());
        let mut place = first.cast_mut();
        let mut written = 0;
        while place.cast_const() < end {
            *place = if written < name.len() - 1 { name[written] } else { 0 };
            (place, written) = (place.add(1), written + 1);
        }
        let _ = call(number::PRCTL, [PR_SET_NAME, name.as_ptr() as usize, 0, 0, 0, 0]);
    }
}

/// Makes the terminal and starts the command on it.
fn start(arguments: &Arguments) -> Result<i32, i32> {
    close(PROGRAM);
    set_session()?;
    // The standard streams are pipes of runc. What is opened next must lie above the fixed numbers.
    let null = open(b"/dev/null\0", O_RDWR | O_NOCTTY | O_CLOEXEC)?;
    for number in (0..3).chain([PROGRAM]).chain(MASTER..FREE) {
        // SAFETY: no memory is involved.
        unsafe { call(number::DUP3, [null as usize, number as usize, O_CLOEXEC * usize::from(number > 2), 0, 0, 0]) }
            .or_else(|errno| if null == number { Ok(0) } else { Err(errno) })?;
    }
    put(open(b"/dev/ptmx\0", O_RDWR | O_NOCTTY | O_CLOEXEC)?, MASTER, O_CLOEXEC)?;
    let unlocked = 0_i32;
    ioctl(MASTER, TIOCSPTLCK, &raw const unlocked as usize)?;
    let size = [arguments.rows, arguments.columns, 0, 0];
    ioctl(MASTER, TIOCSWINSZ, &raw const size as usize)?;
    pipe(ORDERS, ORDERS_IN)?;
    pipe(NEWS_OUT, NEWS)?;
    mask(SIG_BLOCK);
    let children: u64 = 1 << (SIGCHLD - 1);
    // SAFETY: the mask is as long as is said. -1 is for a new one.
    let signals = unsafe { call(number::SIGNALFD4, [usize::MAX, &raw const children as usize, 8, O_CLOEXEC, 0, 0]) }?;
    put(signals as i32, SIGNALS, O_CLOEXEC)?;
    let mut ends = [0_i32; 2];
    // SAFETY: there is space for two numbers.
    unsafe { call(number::PIPE2, [ends.as_mut_ptr() as usize, O_CLOEXEC, 0, 0, 0, 0]) }?;
    put(ends[0], START, O_CLOEXEC)?;
    let command = fork()?;
    if command == 0 {
        let Err(errno) = run(arguments);
        write(ends[1], &errno.to_ne_bytes());
        exit(127);
    }
    close(ends[1]);
    let mut errno = [0_u8; 4];
    let said = read(START, &mut errno)?;
    close(START);
    close(PROGRAM);
    if said == errno.len() { Err(i32::from_ne_bytes(errno)) } else { Ok(command as i32) }
}

/// Becomes the command, on the terminal.
fn run(arguments: &Arguments) -> Result<core::convert::Infallible, i32> {
    close(SOCKET);
    set_session()?;
    let mut number = 0_u32;
    ioctl(MASTER, TIOCGPTN, &raw mut number as usize)?;
    let mut path = *b"/dev/pts/\0\0\0\0\0\0\0\0\0\0\0";
    let (mut digits, mut length, mut rest) = ([0_u8; 10], 0, number);
    loop {
        digits[length] = b'0' + (rest % 10) as u8;
        (length, rest) = (length + 1, rest / 10);
        if rest == 0 {
            break;
        }
    }
    for place in 0..length {
        path[9 + place] = digits[length - 1 - place];
    }
    let terminal = open(&path, O_RDWR | O_NOCTTY | O_CLOEXEC)?;
    ioctl(terminal, TIOCSCTTY, 0)?;
    for number in 0..3 {
        // SAFETY: no memory is involved.
        unsafe { call(number::DUP3, [terminal as usize, number, 0, 0, 0, 0]) }?;
    }
    mask(SIG_UNBLOCK);
    // SAFETY: the kernel has made both lists, which end with a null.
    unsafe { find(arguments.command, arguments.environment) }
}

/// Runs the program that the first word names, as execvp(3) finds it.
///
/// # Safety
/// Lists of strings that end with a null.
unsafe fn find(command: Words, environment: Words) -> Result<core::convert::Infallible, i32> {
    // SAFETY: by the caller.
    let (name, directories) = unsafe { (text(*command), path_of(environment)) };
    // SAFETY: as before; the path ends with a NUL.
    let attempt = |path: *const u8| match unsafe {
        call(number::EXECVE, [path as usize, command as usize, environment as usize, 0, 0, 0])
    } {
        Err(errno) => errno,
        // It does not return.
        Ok(_) => exit(127),
    };
    if name.contains(&b'/') {
        // SAFETY: as before.
        return Err(attempt(unsafe { *command }));
    }
    let mut reason = ENOENT;
    for directory in directories.split(|byte| *byte == b':') {
        let mut path = [0_u8; LONGEST_PATH];
        let directory = if directory.is_empty() { b"." } else { directory };
        if directory.len() + name.len() + 2 > path.len() {
            reason = ENAMETOOLONG;
            continue;
        }
        path[..directory.len()].copy_from_slice(directory);
        path[directory.len()] = b'/';
        path[directory.len() + 1..][..name.len()].copy_from_slice(name);
        match attempt(path.as_ptr()) {
            ENOENT | ENOTDIR => {}
            EACCES => reason = EACCES,
            errno => return Err(errno),
        }
    }
    Err(reason)
}

/// # Safety
/// A list of strings that ends with a null.
unsafe fn path_of<'a>(mut environment: Words) -> &'a [u8] {
    // SAFETY: by the caller.
    unsafe {
        while !(*environment).is_null() {
            if let Some(path) = text(*environment).strip_prefix(b"PATH=") {
                return path;
            }
            environment = environment.add(1);
        }
    }
    b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

/// `struct pollfd`.
#[repr(C)]
struct Poll {
    descriptor: i32,
    events: i16,
    found: i16,
}

/// Waits for the command's end, for orders, and for silence.
fn attend(command: i32, mut is_attended: bool) -> ! {
    let (mut silences, mut has_ended) = (0, false);
    if !is_attended {
        close(MASTER);
    }
    loop {
        let mut ready = [ORDERS, SIGNALS].map(|descriptor| Poll { descriptor, events: POLLIN, found: 0 });
        let limit = [SILENCE, 0];
        let limit = if is_attended { &raw const limit as usize } else { 0 };
        // SAFETY: two of them, and a time that the kernel may change.
        let found = unsafe { call(number::PPOLL, [ready.as_mut_ptr() as usize, 2, limit, 0, 0, 0]) };
        match found {
            Ok(0) => silences += 1,
            Ok(_) => {}
            Err(_) => continue,
        }
        if ready[0].found & POLLIN != 0 {
            silences = 0;
            let mut orders = [BEAT; 64];
            if matches!(read(ORDERS, &mut orders), Ok(1..)) && orders.contains(&QUIT) {
                silences = SILENCES;
            }
        }
        if ready[1].found & POLLIN != 0 {
            // A signal is all that it says: `struct signalfd_siginfo`.
            let _ = read(SIGNALS, &mut [0; 128]);
            let mut status = 0_i32;
            // SAFETY: there is space for the status.
            let reaped =
                unsafe { call(number::WAIT4, [command as usize, &raw mut status as usize, WNOHANG, 0, 0, 0]) };
            if matches!(reaped, Ok(1..)) {
                has_ended = true;
                write(NEWS, &status.to_ne_bytes());
            }
        }
        if silences >= SILENCES && is_attended {
            // The terminal hangs up, as nobody else has this end.
            is_attended = false;
            close(MASTER);
        }
        // What ignores that its terminal is gone keeps a parent that waits for it.
        if has_ended && !is_attended {
            exit(0);
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(126)
}

/// Named by the library of the language, which was built for programs that unwind. This one does not.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// What the compiler calls for copies and comparisons.
mod memory {
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
        for place in 0..length {
            // SAFETY: by the caller.
            unsafe { *to.add(place) = *from.add(place) };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, value: i32, length: usize) -> *mut u8 {
        for place in 0..length {
            // SAFETY: by the caller.
            unsafe { *to.add(place) = value as u8 };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
        for place in 0..length {
            // SAFETY: by the caller.
            let (left, right) = unsafe { (*left.add(place), *right.add(place)) };
            if left != right {
                return i32::from(left) - i32::from(right);
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
        // SAFETY: by the caller.
        unsafe { memcmp(left, right, length) }
    }
}

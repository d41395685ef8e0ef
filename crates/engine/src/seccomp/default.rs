//! The system calls that a container may make when its user says nothing.
//!
//! The rules are those of Podman's default profile (containers/common, `pkg/seccomp/seccomp.json`,
//! Apache-2.0) as of 2024: what every program needs is allowed, what changes the node or reaches into other
//! processes only with the capability that the kernel asks for, and the rest does not exist (ENOSYS), so
//! that programs fall back on what there was before. The list is written anew here, in groups, with calls
//! that kernels have had since and that reach no further than those beside them.
//!
//! A node compares the filters of services that arrive with this list: what a version takes out of it, services
//! of older versions may do still, and would be refused. (Not so Landlock's calls, see `refused`.)
//!
//! Where it differs on purpose:
//! - io_uring, memfd_secret and Landlock stay away: nothing can dump what they hold, so a service with them could
//!   not move. A program that would confine itself by Landlock learns that there is none when it starts;
//! - what obsolete architectures alone have is left out.

use serde_json::{Value, json};

use super::Machine;

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSYS: u32 = 38;
const AF_NETLINK: u32 = 16;
const NETLINK_AUDIT: u32 = 9;

/// Files, directories, their attributes, and what is read and written.
const FILES: &str = "
    _llseek access cachestat chdir chmod chown chown32 close close_range copy_file_range creat dup dup2
    dup3 faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat
    fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fremovexattr
    fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futimesat getcwd
    getdents getdents64 getxattr getxattrat inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch ioctl lchown lchown32 lgetxattr link linkat listxattr listxattrat llistxattr
    lremovexattr lseek lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat name_to_handle_at newfstatat
    open openat openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead
    readdir readlink readlinkat readv removexattr removexattrat rename renameat renameat2 rmdir sendfile
    sendfile64 setxattr setxattrat splice stat stat64 statfs statfs64 statx symlink symlinkat sync
    sync_file_range syncfs tee truncate truncate64 umask unlink unlinkat utime utimensat
    utimensat_time64 utimes write writev";

/// Waiting for files, and asynchronous reads and writes of the old kind.
const WAITING: &str = "
    _newselect epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
    epoll_wait_old eventfd eventfd2 io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64
    io_setup io_submit pause poll ppoll ppoll_time64 pselect6 pselect6_time64 select signalfd signalfd4";

/// Memory of the caller.
const MEMORY: &str = "
    brk madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap mmap2
    mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
    remap_file_pages";

/// Processes and threads: their making and end, scheduling, limits, credentials, and rules for themselves.
const PROCESSES: &str = "
    capget capset clone clone3 execve execveat exit exit_group fork futex futex_requeue futex_time64
    futex_wait futex_waitv futex_wake get_robust_list get_thread_area getcpu getegid getegid32 geteuid
    geteuid32 getgid getgid32 getgroups getgroups32 getpgid getpgrp getpid getppid getpriority getresgid
    getresgid32 getresuid getresuid32 getrlimit getrusage getsid gettid getuid getuid32 ioprio_get
    ioprio_set keyctl kill pidfd_getfd pidfd_open pidfd_send_signal prctl prlimit64 process_mrelease
    restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
    sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler
    sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsgid32 setfsuid
    setfsuid32 setgid setgid32 setgroups setgroups32 setns setpgid setpriority setregid setregid32
    setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setuid setuid32
    sigaltstack sigreturn tgkill tkill ugetrlimit unshare vfork wait4 waitid waitpid";

/// Sockets, and System V and POSIX communication between processes.
const COMMUNICATION: &str = "
    accept accept4 bind connect getpeername getsockname getsockopt ipc listen mq_getsetattr mq_notify
    mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink msgctl
    msgget msgrcv msgsnd recv recvfrom recvmmsg recvmmsg_time64 recvmsg semctl semget semop semtimedop
    semtimedop_time64 send sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown
    socketcall socketpair";

/// Time and timers. The kernel lets no container set a clock by `adjtimex` and its like.
const TIME: &str = "
    adjtimex alarm clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 getitimer gettimeofday nanosleep setitimer
    time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime
    timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
    times";

/// What the system is, and mounts: the kernel asks for a capability in the namespace that they change.
const SYSTEM: &str = "
    fsconfig fsmount fsopen fspick getrandom listmount mount mount_setattr move_mount open_tree
    pivot_root reboot statmount sysinfo syslog umount umount2 uname";

/// What only some architectures have.
const X86: &str = "arch_prctl modify_ldt";
const ARM: &str = "arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2";
const RISCV: &str = "riscv_flush_icache riscv_hwprobe";

/// Allowed with the capability, and EPERM without it.
pub(super) const BY_CAPABILITY: &[(&str, &str)] = &[
    ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    (
        "CAP_SYS_ADMIN",
        "bpf fanotify_init lookup_dcookie perf_event_open quotactl quotactl_fd setdomainname sethostname",
    ),
    ("CAP_SYS_CHROOT", "chroot"),
    ("CAP_SYS_MODULE", "delete_module finit_module init_module query_module"),
    ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("CAP_SYS_PACCT", "acct"),
    ("CAP_SYS_PTRACE", "kcmp process_madvise process_vm_readv process_vm_writev ptrace"),
    ("CAP_SYS_RAWIO", "ioperm iopl"),
    ("CAP_SYS_TIME", "clock_settime clock_settime64 settimeofday stime"),
    ("CAP_SYS_TTY_CONFIG", "vhangup"),
];

/// EPERM always: programs take ENOSYS of these for another reason than that they may not.
const REFUSED: &str = "
    bdflush kexec_file_load kexec_load migrate_pages move_pages nfsservctl nice oldfstat oldlstat
    oldolduname oldstat olduname sgetmask ssetmask swapoff swapon sysfs uselib userfaultfd ustat vm86
    vm86old vmsplice";

/// Arguments of `personality` that only a program for an older kernel or a 32-bit machine asks for, and the
/// question which it is.
const PERSONALITIES: &[u64] = &[0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// The filter for a container with these capabilities on these machines.
pub(super) fn filter(capabilities: &[String], machines: &[Machine]) -> Value {
    let of_machine = |machine: &Machine| match machine.name {
        "arm64" => ARM,
        "riscv64" => RISCV,
        _ => X86,
    };
    let names = |words: &'static str| words.split_ascii_whitespace().collect::<Vec<_>>();
    let always = [FILES, WAITING, MEMORY, PROCESSES, COMMUNICATION, TIME, SYSTEM].into_iter();
    let always: Vec<_> = always.chain(machines.iter().map(of_machine)).flat_map(names).collect();
    let mut rules = vec![
        json!({ "names": always, "action": "SCMP_ACT_ALLOW" }),
        json!({ "names": names(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM }),
    ];
    rules.extend(PERSONALITIES.iter().map(|value| {
        json!({
            "names": ["personality"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{ "index": 0, "value": value, "valueTwo": 0, "op": "SCMP_CMP_EQ" }],
        })
    }));
    let holds = |capability: &str| capabilities.iter().any(|held| held == capability);
    rules.extend(BY_CAPABILITY.iter().map(|(capability, calls)| match holds(capability) {
        true => json!({ "names": names(calls), "action": "SCMP_ACT_ALLOW" }),
        false => json!({ "names": names(calls), "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM }),
    }));
    rules.extend(sockets(holds("CAP_AUDIT_WRITE")));
    let of = |machine: &Machine| std::iter::once(machine.native).chain(machine.older.iter().copied());
    let architectures: Vec<_> = machines.iter().flat_map(of).collect();
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": architectures,
        "syscalls": rules,
    })
}

/// The kernel's audit socket is for who may write to the audit log. Others get EINVAL, which libaudit takes for
/// a kernel without it.
fn sockets(audit: bool) -> Vec<Value> {
    if audit {
        return vec![json!({ "names": ["socket"], "action": "SCMP_ACT_ALLOW" })];
    }
    let compare =
        |index: u32, value: u32, op: &str| json!({ "index": index, "value": value, "valueTwo": 0, "op": op });
    vec![
        json!({
            "names": ["socket"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": EINVAL,
            "args": [compare(0, AF_NETLINK, "SCMP_CMP_EQ"), compare(2, NETLINK_AUDIT, "SCMP_CMP_EQ")],
        }),
        json!({ "names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [compare(2, NETLINK_AUDIT, "SCMP_CMP_NE")] }),
        json!({ "names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [compare(0, AF_NETLINK, "SCMP_CMP_NE")] }),
    ]
}

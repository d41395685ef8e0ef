// Runs a program under a seccomp filter that allows every system call: filtered PROGRAM ARGUMENT...
//
// A process that has any filter may not lift those of others (PTRACE_O_SUSPEND_SECCOMP in ptrace(2)), as CRIU does.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { 1, &allow };

	if (argc < 2) {
		fprintf(stderr, "usage: filtered PROGRAM ARGUMENT...\n");
		return 2;
	}
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
		perror("prctl(PR_SET_SECCOMP)");
		return 1;
	}
	execvp(argv[1], argv + 1);
	perror(argv[1]);
	return 1;
}

/* The program's start: the runtime's _start calls __gw_main when arguments, data stack and control
 * block stand in neutral memory. */
#include <elf.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>
#include "pthread_impl.h"
#include "libc.h"

static void dummy1(void *p) {}
weak_alias(dummy1, __init_ssp);

int main(int, char **, char **);
void __gw_run_constructors(void);
hidden void __init_tls(size_t *);

/* As in musl: as many entries as are looked at. */
#define AUX_CNT 38

static void init_libc(char **envp, const char *name, const unsigned long *auxv)
{
	size_t i, aux[AUX_CNT] = { 0 };

	__environ = envp;
	libc.auxv = (size_t *)auxv;
	for (i = 0; auxv[i]; i += 2)
		if (auxv[i] < AUX_CNT)
			aux[auxv[i]] = auxv[i + 1];
	libc.page_size = aux[AT_PAGESZ];
	libc.secure = aux[AT_UID] != aux[AT_EUID] || aux[AT_GID] != aux[AT_EGID] || aux[AT_SECURE];

	if (!name)
		name = (const char *)aux[AT_EXECFN];
	if (!name)
		name = "";
	__progname = __progname_full = (char *)name;
	for (i = 0; name[i]; i++)
		if (name[i] == '/')
			__progname = (char *)name + i + 1;

	__init_tls(aux);
	__init_ssp((void *)aux[AT_RANDOM]);
}

/* The index of a program (isa/cc) starts an executable under another name than the one that was typed. */
static void take_name(char **argv, char **envp)
{
	static const char key[] = "GODWIT_ARGV0=";
	char **from, **to;

	for (from = to = envp; *from; from++) {
		if (argv[0] && !strncmp(*from, key, sizeof key - 1))
			argv[0] = *from + sizeof key - 1;
		else
			*to++ = *from;
	}
	*to = 0;
}

int __gw_main(int argc, char **argv, char **envp, const unsigned long *auxv)
{
	take_name(argv, envp);
	init_libc(envp, argv[0], auxv);
	__gw_run_constructors();
	exit(main(argc, argv, envp));
}

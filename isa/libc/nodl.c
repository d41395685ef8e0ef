// libgodwit-nodl.a: dlopen and its family for programs that can load code, but need not (-lgodwit-nodl). Loading fails
// when it is asked for, as where a file is missing, and no address has a name. Without this library such a program is
// refused when it is linked.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>

static _Thread_local const char *failure;

static void *fail(void) {
    failure = "code cannot be loaded into a program of godwit-cc: it would be of one instruction set";
    return 0;
}

void *dlopen(const char *file, int mode) {
    (void)file, (void)mode;
    return fail();
}

void *dlsym(void *restrict handle, const char *restrict name) {
    (void)handle, (void)name;
    return fail();
}

int dlclose(void *handle) {
    (void)handle;
    fail();
    return -1;
}

char *dlerror(void) {
    const char *last = failure;
    failure = 0;
    return (char *)last;
}

int dladdr(const void *address, Dl_info *info) {
    (void)address, (void)info;
    return 0;
}

int dlinfo(void *handle, int request, void *info) {
    (void)handle, (void)request, (void)info;
    fail();
    return -1;
}

int dl_iterate_phdr(int (*callback)(struct dl_phdr_info *, size_t, void *), void *data) {
    (void)callback, (void)data;
    return 0;
}

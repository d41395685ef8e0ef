/* Asks for code to be loaded, in a program that is built with -lgodwit-nodl; says what it is told. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static void *other(void *unused)
{
    (void)unused;
    /* What went wrong is each thread's own. */
    const char *said = dlerror();
    printf("another thread: %s\n", said ? said : "nothing");
    return NULL;
}

static void tell(const char *what, int failed)
{
    const char *said = dlerror();
    printf("%s: %d, %s\n", what, failed, said ? said : "nothing");
    /* Told once. */
    said = dlerror();
    printf("again: %s\n", said ? said : "nothing");
}

int main(void)
{
    pthread_t thread;
    Dl_info info;
    tell("before", 0);
    void *library = dlopen("libm.so.6", RTLD_NOW);
    tell("dlopen", library == NULL);
    tell("dlopen of itself", dlopen(NULL, RTLD_LAZY) == NULL);
    tell("dlsym", dlsym(RTLD_DEFAULT, "main") == NULL);
    tell("dlclose", dlclose(library) != 0);
    printf("dladdr: %d\n", dladdr((void *)main, &info));
    (void)dlopen("x", RTLD_NOW);
    if (pthread_create(&thread, NULL, other, NULL) != 0 || pthread_join(thread, NULL) != 0)
        return 1;
    tell("behind the thread", 1);
    return 0;
}

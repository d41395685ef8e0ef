/* Writes all of its memory again and again, as fast as it is let, and knows what it wrote.
 *
 *   writer MEBIBYTES
 *
 * In pass P word W of page I becomes mixed(P, I, W): nothing that compresses, and no word that stays
 * as it was. It listens on port 7000. For every byte that comes over a connection it stands still
 * between two pages, compares all of them with what it wrote last, and answers "ok NUMBER\n", where
 * NUMBER counts the pages written so far; or it says what is wrong on the connection and on standard
 * error, and ends with status 1.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define WORDS 512UL
#define PAGE (WORDS * 8)

static uint64_t *memory;
static uint64_t pages;
/* Pages written in all; the next one is number `written % pages` of pass `written / pages`. */
static uint64_t written;

static atomic_bool wanted;
static bool still;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* SplitMix64's output function (Steele, Lea, Flood 2014). */
static uint64_t mixed(uint64_t pass, uint64_t page, uint64_t word) {
    uint64_t state = (pass + 1) * 0x9e3779b97f4a7c15 + page * WORDS + word;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    return state ^ (state >> 31);
}

static void *write_on(void *nothing) {
    for (;;) {
        if (atomic_load(&wanted)) {
            pthread_mutex_lock(&lock);
            still = true;
            pthread_cond_broadcast(&changed);
            while (atomic_load(&wanted))
                pthread_cond_wait(&changed, &lock);
            still = false;
            pthread_mutex_unlock(&lock);
        }
        uint64_t page = written % pages, pass = written / pages;
        for (uint64_t word = 0; word < WORDS; word++)
            memory[page * WORDS + word] = mixed(pass, page, word);
        written++;
    }
    return nothing;
}

/* The first page that is not as it was written; `pages` when there is none. */
static uint64_t wrong_page(void) {
    for (uint64_t page = 0; page < pages; page++) {
        uint64_t passes = written / pages + (page < written % pages);
        for (uint64_t word = 0; word < WORDS; word++) {
            uint64_t due = passes == 0 ? 0 : mixed(passes - 1, page, word);
            if (memory[page * WORDS + word] != due)
                return page;
        }
    }
    return pages;
}

static void answer(int connection) {
    pthread_mutex_lock(&lock);
    atomic_store(&wanted, true);
    while (!still)
        pthread_cond_wait(&changed, &lock);
    uint64_t wrong = wrong_page(), count = written;
    if (wrong == pages)
        dprintf(connection, "ok %lu\n", count);
    else {
        dprintf(2, "page %lu is not as it was written, after %lu\n", wrong, count);
        dprintf(connection, "page %lu is not as it was written, after %lu\n", wrong, count);
        exit(1);
    }
    atomic_store(&wanted, false);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void *converse(void *socket) {
    int connection = (int)(intptr_t)socket;
    char byte;
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    while (read(connection, &byte, 1) == 1) {
        pthread_mutex_lock(&one);
        answer(connection);
        pthread_mutex_unlock(&one);
    }
    close(connection);
    return NULL;
}

int main(int count, char **words) {
    pages = (count == 2 ? strtoul(words[1], NULL, 10) : 0) * (1 << 20) / PAGE;
    if (pages == 0) {
        fprintf(stderr, "usage: writer MEBIBYTES\n");
        return 2;
    }
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7000)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16))
        fail("listening on port 7000");
    pthread_t thread;
    if (pthread_create(&thread, NULL, write_on, NULL))
        fail("pthread_create");
    for (;;) {
        int connection = accept(listener, NULL, NULL);
        if (connection < 0)
            fail("accept");
        if (pthread_create(&thread, NULL, converse, (void *)(intptr_t)connection))
            fail("pthread_create");
        pthread_detach(thread);
    }
}

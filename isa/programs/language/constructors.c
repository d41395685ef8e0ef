// Static constructors and destructors with and without priorities, atexit in reverse, weak and strong symbols, aliases.
// The second half stands in constructors_other.c.
#include <stdio.h>
#include <stdlib.h>

extern int strong_wins(void) __attribute__((weak));
extern int absent(void) __attribute__((weak));
extern int absent_data __attribute__((weak));
extern int other_value, other_order;

int order;

__attribute__((weak)) int overridden(void) { return 1; }
__attribute__((weak)) int kept(void) { return 2; }
int same(void) __attribute__((alias("kept")));

static void note(int digit) { order = order * 10 + digit; }

__attribute__((constructor(300))) static void third(void) { note(3); }
__attribute__((constructor(101))) static void first(void) { note(1); }
__attribute__((constructor)) static void last(void) { note(9); }
__attribute__((constructor(200))) static void second(void) { note(2); }

__attribute__((destructor(101))) static void at_the_very_end(void) { printf("destructor 101\n"); }
__attribute__((destructor(300))) static void before_it(void) { printf("destructor 300\n"); }
__attribute__((destructor)) static void early(void) { printf("destructor without priority\n"); }

static void by_atexit(void) { printf("atexit, registered first\n"); }
static void by_atexit_later(void) { printf("atexit, registered last\n"); }

int main(void) {
    printf("order %d, other's %d\n", order, other_order);
    printf("weak %d %d %d %d\n", strong_wins ? strong_wins() : -1, overridden(), kept(), same());
    printf("absent %d %d\n", absent == NULL, &absent_data == NULL);
    printf("value %d\n", other_value);
    if (atexit(by_atexit) || atexit(by_atexit_later))
        return 1;
    return 0;
}

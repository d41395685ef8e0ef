// The second half of constructors.c: strong definitions, and a constructor between those of the first half.
extern int order;

int other_order, other_value = 40;

int strong_wins(void);
int overridden(void);

int strong_wins(void) { return 11; }
int overridden(void) { return 22; }

__attribute__((constructor(250))) static void between(void) {
    other_order = order;
    other_value += 2;
}

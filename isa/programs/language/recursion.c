// Recursion: mutual, through a pointer, with much state per frame, and over a tree on the heap.
#include <stdio.h>
#include <stdlib.h>

struct node {
    struct node *left, *right;
    int key;
    double weight;
};

static int is_odd(unsigned n);

static __attribute__((noinline)) int is_even(unsigned n) { return n == 0 ? 1 : is_odd(n - 1); }

static __attribute__((noinline)) int is_odd(unsigned n) { return n == 0 ? 0 : is_even(n - 1); }

static void hanoi(int discs, int from, int to, int by, long *moves, unsigned *hash) {
    if (discs == 0)
        return;
    hanoi(discs - 1, from, by, to, moves, hash);
    ++*moves;
    *hash = *hash * 31 + (unsigned)(from * 3 + to);
    hanoi(discs - 1, by, to, from, moves, hash);
}

static int queens(int size, int row, unsigned columns, unsigned left, unsigned right) {
    int found = 0;
    if (row == size)
        return 1;
    for (int column = 0; column < size; column++) {
        unsigned bit = 1U << column;
        if (!(columns & bit) && !(left & bit) && !(right & bit))
            found += queens(size, row + 1, columns | bit, (left | bit) << 1, (right | bit) >> 1);
    }
    return found;
}

static struct node *insert(struct node *node, int key) {
    if (!node) {
        node = calloc(1, sizeof *node);
        if (!node)
            exit(3);
        node->key = key;
        node->weight = key * 0.125;
    } else if (key < node->key) {
        node->left = insert(node->left, key);
    } else {
        node->right = insert(node->right, key);
    }
    return node;
}

static double walk(const struct node *node, int depth, int *deepest) {
    if (!node)
        return 0;
    if (depth > *deepest)
        *deepest = depth;
    double left = walk(node->left, depth + 1, deepest), right = walk(node->right, depth + 1, deepest);
    return left - right * 0.5 + node->weight;
}

static void release(struct node *node) {
    if (node) {
        release(node->left);
        release(node->right);
        free(node);
    }
}

static void permute(char *text, int at, int length, unsigned *hash, int *count) {
    if (at == length) {
        for (int i = 0; i < length; i++)
            *hash = *hash * 131 + (unsigned char)text[i];
        ++*count;
        return;
    }
    for (int i = at; i < length; i++) {
        char kept = text[at];
        text[at] = text[i];
        text[i] = kept;
        permute(text, at + 1, length, hash, count);
        text[i] = text[at];
        text[at] = kept;
    }
}

// Eight values that are live across the call.
static double many(int n, double a, double b, double c, long d, long e, float f, char g) {
    if (n == 0)
        return a + b * 2 + c * 3 + (double)d + (double)e + f + g;
    double inner = many(n - 1, b, c, a, e, d + n, f * 0.5f, (char)(g ^ n));
    return inner + a - b + c * (double)d - (double)e + f + g;
}

int main(void) {
    long moves = 0;
    unsigned hash = 1;
    struct node *tree = NULL;
    char text[] = "abcdef";
    int deepest = 0, count = 0;

    printf("even %d odd %d\n", is_even(1000), is_odd(777));
    hanoi(9, 0, 2, 1, &moves, &hash);
    printf("hanoi %ld %08x\n", moves, hash);
    printf("queens %d\n", queens(6, 0, 0, 0, 0));
    for (unsigned i = 0, key = 1; i < 200; i++, key = key * 1103515245 + 12345)
        tree = insert(tree, (int)(key >> 16) % 1000);
    printf("tree %.10f", walk(tree, 1, &deepest));
    printf(" depth %d\n", deepest);
    release(tree);
    hash = 0;
    permute(text, 0, 6, &hash, &count);
    printf("permutations %d %08x %s\n", count, hash, text);
    printf("many %.12f\n", many(40, 1.5, -2.25, 3.125, 7, -9, 100.0f, 'x'));
    return 0;
}

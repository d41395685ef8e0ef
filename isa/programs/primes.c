// Writes the first 30,000 primes to a file: the README's example of a program that changes its instruction set.
#include <stdio.h>

int main(void) {
    FILE *file = fopen("primes.txt", "w");
    int found = 0;
    for (int n = 2; found < 30000; n++) {
        int prime = 1;
        for (int d = 2; d * d <= n && prime; d++)
            prime = n % d != 0;
        if (prime && ++found)
            fprintf(file, "%d\n", n);
    }
    fclose(file);
    printf("%d primes\n", found);
}

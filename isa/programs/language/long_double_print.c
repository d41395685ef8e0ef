// long double through the C library: printf, strtold, scanf and functions of math.h. Only for where long double is
// binary128 in the C library too; the numbers are rounded to what all libraries agree on:
// musl's expl and logl of binary128 are those of double.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    long double third = 1.0L / 3, parsed = strtold("3.14159265358979323846264338327950288", NULL), read = 0;
    printf("%.33Lf %Lg %.20Le %La\n", third, third, parsed, 1.5L);
    printf("%d %.30Lf\n", sscanf("2.718281828459045235360287471352", "%Lf", &read), read);
    for (int i = 1; i <= 5; i++)
        printf("%.28Lg %.12Lg %.12Lg\n", sqrtl(i), expl(i * 0.25L), logl(i + 0.5L));
    printf("%.28Lg %.28Lg %.28Lg\n", floorl(-2.5L), fmodl(17.25L, 4), ldexpl(1.25L, 100));
    printf("%40.10Lf|%-20.3Le|%+Lg\n", 1e20L / 7, parsed, -third);
    return 0;
}

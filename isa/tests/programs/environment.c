// Prints its environment, which the runtime hands over without its own variables.
#include "library.h"

extern char **gw_test_environment;

int main(void) {
    for (char **variable = gw_test_environment; *variable; variable++)
        print("%s\n", *variable);
    return 0;
}

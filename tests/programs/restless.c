// A process tree that does not stand still by itself: processes fork and end without a pause, and some begin this program anew.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **arguments) {
    if (count > 1)
        return 7;
    for (unsigned long turn = 1;; turn++) {
        pid_t child = fork();
        if (child == 0) {
            if (turn % 2)
                _exit(7);
            execl("/bin/restless", "restless", "child", (char *)0);
            _exit(1);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7) {
            printf("turn %lu went wrong\n", turn);
            return 1;
        }
        if (turn % 100 == 0) {
            printf("turn %lu\n", turn);
            fflush(stdout);
        }
    }
}

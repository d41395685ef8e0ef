/* Ends by the signal 58 of its own kernel, so that whoever has started it under an emulator learns its number outside. */
#include <signal.h>

int main(void)
{
    raise(58);
    return 0;
}

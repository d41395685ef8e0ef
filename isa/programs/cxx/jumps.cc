// setjmp and longjmp beside exceptions: both in one function, one inside of the other, in loops.
#include <csetjmp>
#include <cstdio>
#include <stdexcept>

namespace {

std::jmp_buf outer, inner;

void leave(int how, int n) {
  if (n > 0) {
    leave(how, n - 1);
    std::printf("wrong: came back\n");
  }
  if (how % 3 == 0)
    std::longjmp(outer, how + 1);
  if (how % 3 == 1)
    throw how;
  std::longjmp(inner, how + 1);
}

void handles(int how) {
  try {
    leave(how, 3);
  } catch (int number) {
    std::printf("handler %d\n", number);
    if (number > 5)
      std::longjmp(outer, 100 + number);
    throw std::runtime_error("again");
  }
}

} // namespace

int main() {
  volatile int turns = 0;
  // As volatile: a jump may go past what changes it.
  for (volatile int turn = 0; turn < 12;) {
    const int how = turn;
    turn = how + 1;
    try {
      if (int value = setjmp(outer)) {
        std::printf("outer %d\n", value);
        continue;
      }
      if (int value = setjmp(inner)) {
        std::printf("inner %d\n", value);
        if (value > 6)
          throw 'c';
        continue;
      }
      turns = turns + 1;
      handles(how);
    } catch (const std::runtime_error &error) {
      std::printf("caught %s\n", error.what());
    } catch (char) {
      std::printf("thrown behind a jump\n");
    }
  }
  std::printf("%d turns\n", turns);
}

// Handlers of signals that throw and catch by themselves, in the middle of another exception's clean-ups too.
#include <csignal>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

volatile std::sig_atomic_t handled = 0;

int fall(int frames) {
  std::string text(static_cast<size_t>(frames) + 1, 'x');
  if (frames == 0)
    throw std::length_error(text + " at the bottom");
  return fall(frames - 1) + static_cast<int>(text.size());
}

void on_signal(int number) {
  try {
    fall(3);
  } catch (const std::length_error &error) {
    std::printf("signal %d: %s, %d on the way\n", number == SIGUSR1 ? 1 : 2, error.what(), std::uncaught_exceptions());
  }
  handled = handled + 1;
  if (number == SIGUSR1 && handled % 3 == 0)
    std::raise(SIGUSR2);
}

struct Raises {
  ~Raises() {
    std::raise(SIGUSR1);
    std::printf("clean-up, %d on the way\n", std::uncaught_exceptions());
  }
};

void leaves(int turn) {
  Raises first;
  Raises second;
  throw turn;
}

} // namespace

int main() {
  std::signal(SIGUSR1, on_signal);
  std::signal(SIGUSR2, on_signal);
  for (int turn = 0; turn < 5; ++turn) {
    try {
      leaves(turn);
    } catch (int number) {
      std::raise(SIGUSR1);
      std::printf("caught %d, %d handled\n", number, static_cast<int>(handled));
    }
  }
}

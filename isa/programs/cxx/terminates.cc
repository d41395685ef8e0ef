// Where an exception may not go on std::terminate is called. Its handler here tells which exception it was and never
// returns, so each case has a thread of its own.
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

std::mutex mutex;
std::condition_variable changed;
int ended = 0;

[[noreturn]] void at_the_end() {
  std::string what = "no exception";
  if (std::exception_ptr last = std::current_exception()) {
    try {
      std::rethrow_exception(last);
    } catch (const std::exception &error) {
      what = error.what();
    } catch (...) {
      what = "something";
    }
  }
  std::unique_lock lock(mutex);
  std::cout << "terminate: " << what << "\n";
  ++ended;
  changed.notify_all();
  for (;;)
    changed.wait(lock);
}

void fail(const char *what) { throw std::runtime_error(what); }

void promises() noexcept { fail("out of a noexcept function"); }

struct Throws {
  ~Throws() noexcept(false) { fail("out of a clean-up"); }
};

struct Implicit {
  ~Implicit() { fail("out of a destructor"); }
};

// Which of the two is told differs between libraries.
void clean_up() {
  Throws throws;
  fail("out of a clean-up");
}

void rethrow_of_nothing() { throw; }

void leaves_a_thread() { throw std::runtime_error("out of a thread"); }

void by_a_pointer() {
  void (*volatile function)() noexcept = promises;
  try {
    function();
  } catch (...) {
    std::cout << "wrong: caught behind noexcept\n";
  }
}

struct Unassigned {
  Unassigned &operator=(Unassigned &&) noexcept {
    fail("out of a move");
    return *this;
  }
};

void moves() {
  Unassigned one, other;
  one = std::move(other);
}

void joinable() {
  std::thread forgotten([] {});
}

} // namespace

int main() {
  std::set_terminate(at_the_end);
  int cases = 0;
  for (void (*function)() : {+[] { promises(); }, clean_up, +[] { Implicit implicit; }, rethrow_of_nothing,
                             leaves_a_thread, by_a_pointer, moves, joinable}) {
    ++cases;
    std::thread(function).detach();
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended == cases; });
  }
  std::cout << cases << " cases" << std::endl;
  std::_Exit(0);
}

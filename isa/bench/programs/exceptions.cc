// Two kernels of C++: code that could throw at every call and does not, and exceptions through twenty frames. Neither
// uses the library where it counts, since builds that are compared have different ones. Prints seconds of the
// processor.
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <string>

namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Guard {
  explicit Guard(long &count) : count(count) { ++count; }
  ~Guard() { --count; }
  long &count;
};

// Sums of products by recursive descent; each level has an object with a destructor.
struct Parser {
  const char *at;
  long open = 0;

  [[noreturn]] static void fail() { throw std::runtime_error("not an expression"); }

  long number() {
    if (*at < '0' || *at > '9')
      fail();
    long value = 0;
    while (*at >= '0' && *at <= '9')
      value = value * 10 + *at++ - '0';
    return value;
  }

  [[gnu::noinline]] long factor() {
    Guard guard(open);
    if (*at != '(')
      return number();
    ++at;
    long value = sum();
    if (*at++ != ')')
      fail();
    return value;
  }

  [[gnu::noinline]] long product() {
    Guard guard(open);
    long value = factor();
    while (*at == '*') {
      ++at;
      value = value * factor() % 1000003;
    }
    return value;
  }

  [[gnu::noinline]] long sum() {
    Guard guard(open);
    long value = product();
    while (*at == '+') {
      ++at;
      value += product();
    }
    return value % 1000003;
  }
};

[[gnu::noinline]] int fall(int frames, long &count) {
  Guard guard(count);
  if (frames == 0)
    throw count;
  return fall(frames - 1, count) + 1;
}

} // namespace

int main() {
  long check = 0;
  std::string text = "1";
  for (int i = 0; i < 60; ++i)
    text = "(" + text + "*3+" + std::to_string(i) + ")*(2+7)";
  double begin = now();
  for (int i = 0; i < 100000; ++i)
    check += Parser{text.c_str()}.sum();
  std::printf("parse %.3f\n", now() - begin);
  begin = now();
  long count = 0;
  for (int i = 0; i < 100000; ++i) {
    try {
      fall(20, count);
    } catch (long value) {
      check += value;
    }
  }
  std::printf("throw %.3f\n", now() - begin);
  std::printf("%ld %ld\n", check, count);
}

// Exceptions: through many frames, by every kind of handler, with clean-ups in their order, rethrown, nested, stored.
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

int depth = 0;

struct Noisy {
  explicit Noisy(std::string text) : name(std::move(text)) {
    std::cout << std::string(depth++, ' ') << "+" << name << "\n";
  }
  ~Noisy() { std::cout << std::string(--depth, ' ') << "-" << name << " " << std::uncaught_exceptions() << "\n"; }
  Noisy(const Noisy &) = delete;
  std::string name;
};

struct Base {
  virtual ~Base() = default;
  virtual const char *who() const { return "base"; }
};
struct Other {
  virtual ~Other() = default;
  long other = 17;
};
struct Both : Base, Other {
  const char *who() const override { return "both"; }
};
struct Left : virtual Base {
  int left = 1;
};
struct Right : virtual Base {
  int right = 2;
};
struct Diamond : Left, Right {
  const char *who() const override { return "diamond"; }
};
struct Hidden : private std::runtime_error {
  Hidden() : std::runtime_error("hidden") {}
};
enum class Colour { red, green };

int fall(int n) {
  Noisy here("fall " + std::to_string(n));
  if (n == 0)
    throw std::out_of_range("the bottom of " + here.name);
  int below = fall(n - 1);
  return below + 1;
}

void thrown(int kind) {
  static Both both;
  switch (kind) {
  case 0:
    throw 41;
  case 1:
    throw 2.5;
  case 2:
    throw std::string("a string");
  case 3:
    throw Both();
  case 4:
    throw static_cast<Other *>(&both);
  case 5:
    throw &both;
  case 6:
    throw Diamond();
  case 7:
    throw Hidden();
  case 8:
    throw Colour::green;
  case 9:
    throw nullptr;
  case 10:
    throw "characters";
  case 11:
    throw std::make_unique<int>(5);
  case 12:
    throw &fall;
  case 13:
    throw std::bad_alloc();
  default:
    break;
  }
}

void caught(int kind) {
  try {
    thrown(kind);
    std::cout << "nothing\n";
  } catch (long) {
    std::cout << "wrong: a long\n";
  } catch (int number) {
    std::cout << "int " << number << "\n";
  } catch (const double &number) {
    std::cout << "double " << number << "\n";
  } catch (std::string &text) {
    std::cout << "string " << text << "\n";
  } catch (Other *other) {
    std::cout << "pointer to other " << (other ? other->other : 0) << "\n";
  } catch (const Other &other) {
    std::cout << "other " << other.other << "\n";
  } catch (const Base &base) {
    std::cout << "base " << base.who() << "\n";
  } catch (std::runtime_error &) {
    std::cout << "wrong: a hidden base\n";
  } catch (Colour colour) {
    std::cout << "colour " << static_cast<int>(colour) << "\n";
  } catch (const char *text) {
    std::cout << "characters " << text << "\n";
  } catch (std::unique_ptr<int> &owner) {
    std::cout << "owner of " << *owner << "\n";
  } catch (int (*function)(int)) {
    std::cout << "function " << (function == &fall) << "\n";
  } catch (std::exception &error) {
    std::cout << "exception " << (dynamic_cast<std::bad_alloc *>(&error) != nullptr) << "\n";
  } catch (...) {
    std::cout << "something, held: " << (std::current_exception() != nullptr) << "\n";
  }
}

struct Member {
  explicit Member(int value) : noisy("member " + std::to_string(value)) {
    if (value == 3)
      throw value;
  }
  Noisy noisy;
};

struct Tried {
  Tried(int value) try : first(1), second(value) { std::cout << "made\n"; } catch (int number) {
    std::cout << "function-try " << number << "\n";
    throw std::to_string(number);
  }
  Member first, second;
};

struct Numbered {
  Numbered() : number(made++) {
    std::cout << "element " << number << "\n";
    if (number == 3)
      throw number;
  }
  ~Numbered() { std::cout << "gone " << number << "\n"; }
  int number;
  static int made;
};
int Numbered::made = 0;

struct Thrower {
  ~Thrower() noexcept(false) { throw std::logic_error("from a destructor"); }
};

struct Cleaner {
  ~Cleaner() {
    try {
      Noisy inside("clean-up");
      fall(2);
    } catch (const std::exception &error) {
      std::cout << "inside a clean-up: " << error.what() << ", " << std::uncaught_exceptions() << " on the way\n";
    }
  }
};

void nest(int n) {
  try {
    if (n == 0)
      throw std::runtime_error("innermost");
    nest(n - 1);
  } catch (...) {
    std::throw_with_nested(std::runtime_error("level " + std::to_string(n)));
  }
}

void unwrap(const std::exception &error, int level) {
  std::cout << std::string(level, '.') << error.what() << "\n";
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception &inner) {
    unwrap(inner, level + 1);
  }
}

void rethrown(int times) {
  try {
    if (times == 0)
      throw Both();
    rethrown(times - 1);
  } catch (Base &base) {
    Noisy handler("handler " + std::to_string(times));
    std::cout << base.who() << "\n";
    throw;
  }
}

int loops() {
  int sum = 0;
  for (int i = 0; i < 50; ++i) {
    try {
      try {
        if (i % 3 == 0)
          throw i;
        if (i % 7 == 0)
          throw std::to_string(i);
        sum += 1;
        continue;
      } catch (int number) {
        sum += 100 * number;
        if (number % 2)
          throw 'c';
      }
    } catch (const std::string &text) {
      sum += 10000 * static_cast<int>(text.size());
    } catch (char) {
      if (i > 44)
        break;
    }
  }
  return sum;
}

template <typename T> T checked(const std::vector<T> &all, size_t index) { return all.at(index); }

} // namespace

int main() {
  try {
    std::cout << fall(5) << "\n";
  } catch (const std::exception &error) {
    std::cout << error.what() << "\n";
  }
  for (int kind = 0; kind < 15; ++kind)
    caught(kind);
  for (int value : {2, 3}) {
    try {
      Tried tried(value);
    } catch (const std::string &text) {
      std::cout << "caught " << text << "\n";
    }
  }
  try {
    auto all = std::make_unique<Numbered[]>(6);
  } catch (int number) {
    std::cout << "array ended at " << number << "\n";
  }
  try {
    Noisy around("around");
    Thrower thrower;
  } catch (const std::logic_error &error) {
    std::cout << error.what() << "\n";
  }
  try {
    Cleaner first;
    Cleaner second;
    throw 1;
  } catch (int) {
    std::cout << "cleaned, " << std::uncaught_exceptions() << " on the way\n";
  }
  try {
    nest(4);
  } catch (const std::exception &error) {
    unwrap(error, 0);
  }
  try {
    rethrown(3);
  } catch (const Other &other) {
    std::cout << "at last " << other.other << "\n";
  }
  std::cout << loops() << "\n";

  std::vector<std::exception_ptr> kept;
  for (int kind = 0; kind < 4; ++kind) {
    try {
      thrown(kind);
    } catch (...) {
      kept.push_back(std::current_exception());
    }
  }
  for (int turn = 0; turn < 2; ++turn) {
    for (const std::exception_ptr &one : kept) {
      try {
        std::rethrow_exception(one);
      } catch (int number) {
        std::cout << "kept int " << number << "\n";
      } catch (const std::string &text) {
        std::cout << "kept string " << text << "\n";
      } catch (...) {
        std::cout << "kept something\n";
      }
    }
  }

  std::function<int(int)> recursive = [&](int n) -> int {
    Noisy here("lambda");
    return n == 0 ? throw std::invalid_argument("lambda") : recursive(n - 1) + n;
  };
  try {
    recursive(3);
  } catch (const std::invalid_argument &error) {
    std::cout << error.what() << "\n";
  }
  std::vector<int> numbers = {1, 2, 3};
  for (size_t index : {1, 3}) {
    try {
      std::cout << checked(numbers, index) << "\n";
    } catch (const std::out_of_range &) {
      std::cout << "out of range\n";
    }
  }
  try {
    std::stoi("not a number");
  } catch (const std::invalid_argument &) {
    std::cout << "not a number\n";
  }
  try {
    Both both;
    std::cout << dynamic_cast<Diamond &>(static_cast<Base &>(both)).left << "\n";
  } catch (const std::bad_cast &) {
    std::cout << "bad cast\n";
  }
  std::cout << "depth " << depth << "\n";
}

// Coroutines: frames on the heap that are left and entered again, with exceptions through them.
#include <coroutine>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

template <typename T> class Generator {
public:
  struct promise_type {
    T value{};
    std::exception_ptr failed;
    Generator get_return_object() { return Generator(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    std::suspend_always yield_value(T next) {
      value = std::move(next);
      return {};
    }
    void return_void() {}
    void unhandled_exception() { failed = std::current_exception(); }
  };
  explicit Generator(std::coroutine_handle<promise_type> handle) : handle(handle) {}
  Generator(Generator &&other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  ~Generator() {
    if (handle)
      handle.destroy();
  }
  bool next() {
    handle.resume();
    if (handle.promise().failed)
      std::rethrow_exception(handle.promise().failed);
    return !handle.done();
  }
  const T &value() const { return handle.promise().value; }

private:
  std::coroutine_handle<promise_type> handle;
};

struct Said {
  explicit Said(std::string text) : text(std::move(text)) {}
  ~Said() { std::cout << "end of " << text << "\n"; }
  std::string text;
};

Generator<std::string> words(int count) {
  Said said("words");
  for (int i = 0; i < count; ++i) {
    if (i == 7)
      throw std::length_error("seven words");
    co_yield std::string(i, 'w') + std::to_string(i);
  }
}

Generator<long> squares(long from) {
  Said said("squares");
  for (long i = from;; ++i)
    co_yield i *i;
}

} // namespace

int main() {
  for (int count : {4, 12}) {
    try {
      for (auto all = words(count); all.next();)
        std::cout << all.value() << "\n";
    } catch (const std::length_error &error) {
      std::cout << error.what() << "\n";
    }
  }
  long sum = 0;
  auto first = squares(1);
  for (auto second = squares(10); first.next() && second.next() && second.value() < 2000;)
    sum += first.value() * second.value();
  std::cout << sum << "\n";
}

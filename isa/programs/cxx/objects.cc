// Objects: virtual functions and bases, thunks, pointers to members, RTTI, statics of all kinds and their order.
#include "objects.h"
#include <cstdio>
#include <initializer_list>
#include <string>
#include <typeinfo>

namespace {

struct Said {
  explicit Said(const char *text) : text(text) { std::printf("made %s\n", text); }
  ~Said() { std::printf("unmade %s\n", text); }
  const char *text;
};

__attribute__((init_priority(200))) Said early("early");
Said in_order_1("first of this file");
Said in_order_2("second of this file");

struct Animal {
  explicit Animal(int legs) : legs(legs) {}
  virtual ~Animal() { std::printf("~Animal %d\n", legs); }
  virtual std::string sound() const = 0;
  virtual Animal *self() { return this; }
  int legs;
};
struct Swimmer {
  virtual ~Swimmer() = default;
  virtual int speed() const { return 3; }
  virtual Swimmer *twin() { return this; }
  double depth = 1.5;
};
struct Duck final : Animal, Swimmer {
  Duck() : Animal(2) {}
  std::string sound() const override { return "quack"; }
  int speed() const override { return legs * 10; }
  Duck *self() override { return this; }
  Duck *twin() override { return this; }
};

struct Top {
  Top() { who(); }
  virtual ~Top() { who(); }
  virtual void who() { std::puts("top"); }
  int top = 1;
};
struct Left : virtual Top {
  Left() { who(); }
  void who() override { std::printf("left %d\n", top); }
  int left = 2;
};
struct Right : virtual Top {
  Right() { who(); }
  void who() override { std::printf("right %d\n", top); }
  int right = 3;
};
struct Bottom : Left, Right {
  Bottom() { who(); }
  ~Bottom() override { who(); }
  void who() override { std::printf("bottom %d %d %d\n", top, left, right); }
};

struct Calculator {
  int add(int a, int b) { return a + b + bias; }
  virtual int multiply(int a, int b) { return a * b + bias; }
  virtual ~Calculator() = default;
  int bias = 0;
};
struct Odd : Swimmer, Calculator {
  int multiply(int a, int b) override { return -Calculator::multiply(a, b); }
};

int apply(Calculator &with, int (Calculator::*how)(int, int), int a, int b) { return (with.*how)(a, b); }

Said &once(int turn) {
  std::printf("turn %d\n", turn);
  static Said only("a local static");
  return only;
}

} // namespace

int main() {
  std::printf("main\n");
  Duck duck;
  Swimmer &swimmer = duck;
  std::printf("%s %d %d %d\n", duck.sound().c_str(), swimmer.speed(), swimmer.twin() == &swimmer,
              dynamic_cast<Animal *>(&swimmer) == &duck);
  std::printf("%d %d\n", typeid(swimmer) == typeid(Duck), dynamic_cast<Odd *>(&swimmer) != nullptr);
  std::printf("%s\n", typeid(Bottom *).name());
  {
    Bottom bottom;
    Right &right = bottom;
    right.who();
    std::printf("%d\n", dynamic_cast<Left *>(static_cast<Top *>(&right))->left);
  }
  Calculator plain;
  Odd odd;
  odd.bias = 5;
  int Odd::*bias = &Odd::bias;
  std::printf("%d\n", odd.*bias);
  for (auto how : {&Calculator::add, &Calculator::multiply})
    std::printf("%d %d\n", apply(plain, how, 6, 7), apply(odd, how, 6, 7));
  int (Odd::*down)(int, int) = &Calculator::add;
  std::printf("%d %d\n", (odd.*down)(1, 2), down != nullptr);
  for (int turn = 0; turn < 3; ++turn)
    once(turn);
  std::printf("%d %d\n", shared_counter<int>::next(), shared_counter<long>::next());
  other_file();
  std::printf("%d %d %s\n", shared_counter<int>::next(), shared_counter<long>::next(), inline_text.c_str());
  auto *heap = new Duck[3];
  heap[1].legs = 4;
  delete[] heap;
}

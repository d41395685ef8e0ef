// What both files of the program have: it must be one thing in both.
#pragma once
#include <string>

template <typename T> struct shared_counter {
  static int next() {
    static int value = static_cast<int>(sizeof(T)) * 100;
    return ++value;
  }
};

inline std::string inline_text = "inline";

void other_file();

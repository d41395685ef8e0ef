// The second file: templates and inline variables that the first one has as well.
#include "objects.h"
#include <cstdio>

namespace {

struct Last {
  Last() { std::printf("made in the other file\n"); }
  ~Last() { std::printf("unmade in the other file\n"); }
};
__attribute__((init_priority(300))) Last last;

} // namespace

void other_file() {
  std::printf("%d %d\n", shared_counter<int>::next(), shared_counter<long>::next());
  inline_text += " and other";
}

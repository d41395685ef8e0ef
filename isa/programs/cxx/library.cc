// Parts of the library: containers, algorithms, streams, regular expressions, numbers as text, and types that hold
// others.
#include <algorithm>
#include <any>
#include <array>
#include <bitset>
#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <numeric>
#include <optional>
#include <queue>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

namespace {

struct Node {
  int value;
  std::vector<std::shared_ptr<Node>> below;
  std::weak_ptr<Node> above;
};

int height(const Node &node) {
  int most = 0;
  for (const auto &one : node.below)
    most = std::max(most, height(*one));
  return most + 1;
}

void containers() {
  std::minstd_rand random(42);
  std::vector<int> numbers(500);
  std::generate(numbers.begin(), numbers.end(), [&] { return static_cast<int>(random() % 1000); });
  std::map<int, int> count;
  std::unordered_map<std::string, int> by_text;
  std::set<std::string, std::greater<>> texts;
  for (int number : numbers) {
    ++count[number % 17];
    ++by_text[std::to_string(number % 23)];
    texts.insert(std::to_string(number));
  }
  for (auto [key, times] : count)
    std::cout << key << ":" << times << " ";
  std::cout << by_text.size() << " " << by_text["7"] << " " << *texts.begin() << " " << texts.size() << "\n";
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::cout << numbers.size() << " " << std::accumulate(numbers.begin(), numbers.end(), 0L) << " "
            << std::inner_product(numbers.begin(), numbers.end(), numbers.rbegin(), 0L) << "\n";
  std::list<int> list(numbers.begin(), numbers.begin() + 50);
  list.sort([](int a, int b) { return a % 10 != b % 10 ? a % 10 < b % 10 : a < b; });
  list.remove_if([](int value) { return value % 3 == 0; });
  for (int value : list)
    std::cout << value << " ";
  std::cout << "\n";
  std::priority_queue<std::pair<int, std::string>> queue;
  for (int i = 0; i < 20; ++i)
    queue.emplace(i * 7 % 11, std::string(i, 'x'));
  for (; !queue.empty(); queue.pop())
    std::cout << queue.top().first << "/" << queue.top().second.size() << " ";
  std::cout << "\n";
  std::string permuted = "abcd";
  int permutations = 0;
  while (std::next_permutation(permuted.begin(), permuted.end()))
    ++permutations;
  std::cout << permutations << " " << std::bitset<20>(777) << "\n";
  std::array<char, 4096> memory;
  std::pmr::monotonic_buffer_resource pool(memory.data(), memory.size());
  std::pmr::vector<std::pmr::string> pooled(&pool);
  for (int i = 0; i < 40; ++i)
    pooled.emplace_back(std::string(i, 'p'));
  std::cout << pooled.back().size() << "\n";
}

void streams() {
  std::ostringstream out;
  out << std::hex << std::showbase << 255 << " " << std::dec << std::setw(8) << std::setfill('*') << 42 << " "
      << std::fixed << std::setprecision(3) << 3.14159 << " " << std::scientific << 12345.678 << " " << std::boolalpha
      << true << " " << std::left << std::setw(6) << "ab" << "|";
  std::cout << out.str() << "\n";
  std::istringstream in("12 apples 7.5 0x1f\nlast line\n");
  int apples = 0;
  std::string word, line;
  double weight = 0;
  in >> apples >> word >> weight;
  in.ignore(1000, '\n');
  std::getline(in, line);
  std::cout << apples << word << weight << line << in.good() << in.eof() << "\n";
  std::istringstream wrong("x");
  wrong.exceptions(std::ios::failbit);
  try {
    wrong >> apples;
  } catch (const std::ios_base::failure &) {
    std::cout << "failure " << wrong.fail() << "\n";
  }
}

void expressions() {
  std::string text = "key=value; other = 42; third=a b c";
  std::regex pair(R"((\w+)\s*=\s*([^;]+))");
  for (std::sregex_iterator it(text.begin(), text.end(), pair), end; it != end; ++it)
    std::cout << (*it)[1] << "->" << (*it)[2] << "\n";
  std::cout << std::regex_replace(text, std::regex("[aeiou]"), "_") << "\n";
  try {
    std::regex wrong("(unclosed");
  } catch (const std::regex_error &error) {
    std::cout << (error.code() == std::regex_constants::error_paren) << "\n";
  }
}

void numbers() {
  std::array<char, 64> room;
  for (double value : {0.1, 1e300, -2.5e-10, 1.0 / 3}) {
    auto end = std::to_chars(room.data(), room.data() + room.size(), value).ptr;
    std::cout << std::string_view(room.data(), static_cast<size_t>(end - room.data())) << " ";
  }
  long parsed = 0;
  std::string_view text = "1234567xyz";
  auto result = std::from_chars(text.data(), text.data() + text.size(), parsed);
  std::cout << parsed << " " << result.ptr - text.data() << " " << std::stod("2.75e2") << "\n";
  std::mt19937_64 random(7);
  std::uint64_t mixed = 0;
  for (int i = 0; i < 1000; ++i)
    mixed ^= random();
  std::cout << mixed << "\n";
  using namespace std::chrono_literals;
  std::cout << std::chrono::duration_cast<std::chrono::seconds>(2h + 3min).count() << "\n";
}

void holders() {
  std::variant<int, std::string, std::vector<int>> variant = 5;
  auto size = [](const auto &value) -> size_t {
    if constexpr (requires { value.size(); })
      return value.size();
    else
      return sizeof value;
  };
  std::cout << std::visit(size, variant);
  variant = std::string("seven..");
  std::cout << std::visit(size, variant);
  try {
    std::cout << std::get<int>(variant);
  } catch (const std::bad_variant_access &) {
    std::cout << " wrong alternative ";
  }
  std::optional<std::string> maybe;
  std::any anything = std::string("any");
  std::cout << maybe.value_or("none") << std::any_cast<std::string>(anything);
  try {
    std::any_cast<int>(anything);
  } catch (const std::bad_any_cast &) {
    std::cout << " not an int\n";
  }
  std::vector<std::function<int(int)>> functions;
  for (int i = 1; i < 5; ++i)
    functions.emplace_back([i, text = std::string(i, '!')](int x) { return x * i + static_cast<int>(text.size()); });
  functions.emplace_back(std::bind(std::minus<>(), 100, std::placeholders::_1));
  int through = 3;
  for (const auto &function : functions)
    through = function(through);
  auto [a, b, c] = std::tuple_cat(std::make_tuple(1, 'x'), std::make_tuple(through));
  std::cout << a << b << c << "\n";
  auto root = std::make_shared<Node>(Node{0, {}, {}});
  std::shared_ptr<Node> at = root;
  for (int i = 1; i < 30; ++i) {
    auto next = std::make_shared<Node>(Node{i, {}, at});
    at->below.push_back(next);
    if (i % 3)
      at = next;
  }
  std::cout << height(*root) << " " << at->above.lock()->value << " " << root.use_count() << "\n";
}

} // namespace

int main() {
  containers();
  streams();
  expressions();
  numbers();
  holders();
}

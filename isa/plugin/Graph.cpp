// Tarjan's algorithm without recursion, and a feedback vertex set by degree.
#include "Graph.h"
#include "llvm/ADT/DenseSet.h"
#include "llvm/ADT/STLExtras.h"

using namespace llvm;

namespace godwit {

std::vector<std::vector<unsigned>> Graph::cycles() const {
  constexpr unsigned Unseen = ~0U;
  std::vector<unsigned> Index(Next.size(), Unseen);
  std::vector<unsigned> Low(Next.size(), 0);
  BitVector OnStack(Next.size());
  std::vector<unsigned> Stack;
  std::vector<std::pair<unsigned, unsigned>> Work; // node, next edge to look at
  std::vector<std::vector<unsigned>> Found;
  unsigned Count = 0;

  auto Enter = [&](unsigned Node) {
    Index[Node] = Low[Node] = Count++;
    Stack.push_back(Node);
    OnStack.set(Node);
    Work.emplace_back(Node, 0U);
  };
  for (unsigned Root = 0; Root < Next.size(); ++Root) {
    if (Removed[Root] || Index[Root] != Unseen)
      continue;
    Enter(Root);
    while (!Work.empty()) {
      unsigned Node = Work.back().first;
      if (Work.back().second < Next[Node].size()) {
        unsigned To = Next[Node][Work.back().second++];
        if (Removed[To])
          continue;
        if (Index[To] == Unseen)
          Enter(To);
        else if (OnStack[To])
          Low[Node] = std::min(Low[Node], Index[To]);
        continue;
      }
      Work.pop_back();
      if (!Work.empty())
        Low[Work.back().first] = std::min(Low[Work.back().first], Low[Node]);
      if (Low[Node] != Index[Node])
        continue;
      std::vector<unsigned> Component;
      unsigned Member = 0;
      do {
        Member = Stack.back();
        Stack.pop_back();
        OnStack.reset(Member);
        Component.push_back(Member);
      } while (Member != Node);
      if (Component.size() > 1 || is_contained(Next[Node], Node))
        Found.push_back(std::move(Component));
    }
  }
  return Found;
}

std::vector<unsigned> Graph::breakCycles() {
  std::vector<unsigned> Broken;
  for (std::vector<std::vector<unsigned>> Found = cycles(); !Found.empty(); Found = cycles())
    for (const std::vector<unsigned> &Component : Found) {
      DenseSet<unsigned> Members(Component.begin(), Component.end());
      DenseMap<unsigned, unsigned> In;
      DenseMap<unsigned, unsigned> Out;
      bool CallsItself = false;
      unsigned Best = Component.front();
      for (unsigned Node : Component)
        for (unsigned To : Next[Node])
          if (Members.contains(To)) {
            ++Out[Node];
            ++In[To];
          }
      for (unsigned Node : Component) {
        // A node that is its own successor has to go in any case.
        bool Self = is_contained(Next[Node], Node);
        bool Better = In[Node] * Out[Node] > In[Best] * Out[Best];
        if ((Self && !CallsItself) || (Self == CallsItself && Better))
          Best = Node;
        CallsItself |= Self;
      }
      remove(Best);
      Broken.push_back(Best);
    }
  return Broken;
}

} // namespace godwit

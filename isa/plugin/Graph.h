// Strongly connected components of a small graph, with nodes that can be taken out.
#pragma once

#include "llvm/ADT/BitVector.h"
#include "llvm/ADT/SmallVector.h"
#include <vector>

namespace godwit {

class Graph {
public:
  explicit Graph(unsigned Nodes) : Next(Nodes), Removed(Nodes) {}
  void addEdge(unsigned From, unsigned To) { Next[From].push_back(To); }
  void remove(unsigned Node) { Removed.set(Node); }
  llvm::ArrayRef<unsigned> successors(unsigned Node) const { return Next[Node]; }
  // Components that hold a cycle, without the removed nodes.
  std::vector<std::vector<unsigned>> cycles() const;
  // Takes out nodes, those with the most ways through them first, until no cycle is left; says which.
  std::vector<unsigned> breakCycles();

private:
  std::vector<llvm::SmallVector<unsigned, 4>> Next;
  llvm::BitVector Removed;
};

} // namespace godwit

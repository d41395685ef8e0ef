// Places in memory for the values of a function that are live at its sites, one layout for all of them: what the clone
// of a large function works in (ResumeInMemory.cpp), and what its frames look like then.
#pragma once

#include "Sites.h"
#include "llvm/ADT/MapVector.h"

namespace godwit {

class Slots {
public:
  // Sites must say what they save and derive.
  Slots(llvm::Function &F, llvm::ArrayRef<Site> Sites);

  bool contains(const llvm::Value *V) const { return Offsets.contains(V); }
  uint64_t offset(const llvm::Value *V) const { return Offsets.lookup(V); }
  uint64_t size() const { return Size; }

private:
  llvm::DenseMap<const llvm::Value *, uint64_t> Offsets;
  uint64_t Size = 0;
};

} // namespace godwit

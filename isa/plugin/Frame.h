// The layout of values that leave SSA form for memory: a frame in the continuation buffer, or what setjmp keeps.
#pragma once

#include "llvm/IR/DataLayout.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/Transforms/Utils/SSAUpdater.h"

namespace godwit {

class Frame {
public:
  Frame() = default;
  // One after the other, without gaps.
  Frame(std::vector<llvm::Value *> Live, const llvm::DataLayout &DL);
  // Where the caller wants them.
  Frame(std::vector<llvm::Value *> Live, llvm::function_ref<uint64_t(llvm::Value *)> Offset,
        const llvm::DataLayout &DL);

  llvm::ArrayRef<llvm::Value *> values() const { return Values; }
  // Where each lies, in the same order.
  llvm::ArrayRef<uint64_t> offsets() const { return Offsets; }
  // Bytes, a multiple of 8.
  uint64_t size() const { return Size; }
  void store(llvm::IRBuilderBase &B, llvm::Value *Base) const;
  // The values in the order of values().
  std::vector<llvm::Value *> load(llvm::IRBuilderBase &B, llvm::Value *Base) const;

  // What a value takes in memory.
  static uint64_t bytes(llvm::Type *T, const llvm::DataLayout &DL);
  static void store(llvm::IRBuilderBase &B, llvm::Value *V, llvm::Value *Base, uint64_t Offset);
  static llvm::Value *load(llvm::IRBuilderBase &B, llvm::Type *T, llvm::Value *Base, uint64_t Offset,
                           const llvm::Twine &Name = "");

private:
  std::vector<llvm::Value *> Values;
  std::vector<uint64_t> Offsets;
  uint64_t Size = 0;
};

// Gives a value further definitions, one for each block of the list, and repairs all its uses.
void addDefinitions(llvm::Value *Original, llvm::BasicBlock *OriginalBlock,
                    llvm::ArrayRef<std::pair<llvm::BasicBlock *, llvm::Value *>> More);

} // namespace godwit

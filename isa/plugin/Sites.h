// A site is a call at which a function may be suspended. Shared by the hot side (Capture.cpp) and the cold clones that
// go on from a site (Resume.cpp).
#pragma once

#include "Frame.h"
#include "llvm/IR/InstrTypes.h"

namespace godwit {

struct Site {
  llvm::CallBase *Call = nullptr;
  // Ends in the test of the state: Behind when it is zero, Cold otherwise.
  llvm::BasicBlock *Head = nullptr;
  llvm::BasicBlock *Behind = nullptr;
  llvm::BasicBlock *Cold = nullptr;
  // Gives up the frame; Cold itself, but in a function that uses setjmp.
  llvm::BasicBlock *Save = nullptr;
  Frame Saved;
  // Live behind the call too, but computed again from what is saved, in this order.
  std::vector<llvm::Instruction *> Derived;
  unsigned Id = 0;
};

// Makes the blocks that give up the frames, and sets Save of each site. Sites must say what they save.
void makeSaves(llvm::Function &F, llvm::MutableArrayRef<Site> Sites);

// The clone of F that takes the topmost frame off the continuation buffer and goes on at its site.
llvm::Function *makeResumeClone(llvm::Function &F, llvm::ArrayRef<Site> Sites);

// The same for a large function whose frames are laid out by slots: the clone keeps the values in memory.
class Slots;
llvm::Function *makeResumeCloneInMemory(llvm::Function &F, llvm::ArrayRef<Site> Sites, const Slots &Places);

// Appends "state != 0 ? Cold : Behind" to a block without terminator.
void branchOnState(llvm::IRBuilderBase &B, llvm::BasicBlock *Cold, llvm::BasicBlock *Behind);

} // namespace godwit

/* There is no dynamic linker: what musl wants to know for one is given a value that nothing uses. */
#define LDSO_ARCH "godwit"
#define TPOFF_K 0
#define REL_SYMBOLIC 0
#define REL_GOT 0
#define REL_PLT 0
#define REL_RELATIVE 0
#define REL_COPY 0
#define REL_DTPMOD 0
#define REL_DTPOFF 0
#define REL_TPOFF 0
#define CRTJMP(pc, sp) __builtin_trap()

// What native.load compares before it opens the library: a hash of the sources that define the
// interface between Python, compiled programs and this library (kernels/native.py).
#ifndef SPECC_INTERFACE
#error "kernels/native.py compiles this file with -DSPECC_INTERFACE=<hash>"
#endif
#define SPECC_TEXT_OF(x) #x
#define SPECC_TEXT(x) SPECC_TEXT_OF(x)

extern "C" {
extern __attribute__((visibility("default"), used)) const char specc_interface[];
const char specc_interface[] = "specc-interface:" SPECC_TEXT(SPECC_INTERFACE);
}

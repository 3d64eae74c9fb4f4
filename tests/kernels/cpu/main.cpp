// Launches on the memory in a file: IMAGE ADDRESS PARAMETER BLOCKS LOCALS THREADS CALLS.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

extern "C" {
void call_0(const void* args);
unsigned lanes();
void launch(void (*kernel)(const void*), const void* args, unsigned lanes, unsigned blocks,
            unsigned locals, unsigned threads, unsigned calls);
}

static void* mapped(const char* path, unsigned long long at) {
    const int file = open(path, O_RDWR);
    struct stat status;
    if (file < 0 || fstat(file, &status)) return MAP_FAILED;
    const int flags = MAP_SHARED | (at ? MAP_FIXED_NOREPLACE : 0);
    return mmap(reinterpret_cast<void*>(at), static_cast<size_t>(status.st_size),
                PROT_READ | PROT_WRITE, flags, file, 0);
}

int main(int, char** words) {
    if (mapped(words[1], strtoull(words[2], nullptr, 0)) == MAP_FAILED) return 70;
    void* parameter = mapped(words[3], 0);
    if (parameter == MAP_FAILED) return 71;
    unsigned counts[4];
    for (int k = 0; k < 4; ++k)
        counts[k] = static_cast<unsigned>(strtoul(words[4 + k], nullptr, 0));
    launch(call_0, parameter, lanes(), counts[0], counts[1], counts[2], counts[3]);
    return 0;
}

/* Stands for a file system without locks: preloaded, it makes every flock() of a process fail. */
#include <errno.h>
#include <stdlib.h>

int flock(int descriptor, int operation)
{
    (void)descriptor;
    (void)operation;
    errno = atoi(getenv("NO_LOCKS_ERRNO"));
    return -1;
}

// libfaketime sets the clock of pthread_cond_timedwait, but not that of C11's cnd_timedwait, by which librdkafka waits:
// a time that is read from the one clock and waited for by the other is in the past or far in the future.
#include <errno.h>
#include <pthread.h>
#include <threads.h>

int cnd_timedwait(cnd_t *condition, mtx_t *mutex, const struct timespec *until) {
  int error = pthread_cond_timedwait((pthread_cond_t *)condition, (pthread_mutex_t *)mutex, until);
  return error == 0 ? thrd_success : error == ETIMEDOUT ? thrd_timedout : thrd_error;
}

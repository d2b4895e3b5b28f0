#ifndef DYNAMICCL_GPU_PLAYER_H
#define DYNAMICCL_GPU_PLAYER_H

/* Opens the files that the environment names and starts the player; once per process, however often it is
 * called. Ends the process where a file cannot be used. */
void player_start(void);

#endif

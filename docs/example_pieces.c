/*
 * For an engine with kernels of its own: the experts of a checkpoint's first MoE layer, piece by
 * piece as they arrive in the GPU's memory. An engine gives each call its own stream (cudaStream_t)
 * and launches on it between numoe_gpu_piece_next and numoe_gpu_piece_done.
 */
#include <numoe.h>
#include <numoe_gpu.h>
#include <stdio.h>

static int count_pieces(struct numoe_gpu_model *gpu, unsigned *pieces, struct numoe_error *error)
{
    void *stream = NULL;
    int rc = numoe_gpu_pieces_begin(gpu, 0, NULL, 0, 0, error);

    if (rc)
        return rc;
    for (;;) {
        struct numoe_gpu_piece piece;

        rc = numoe_gpu_piece_next(gpu, stream, &piece, error);
        if (rc || !piece.slice_at)
            break;
        /* kernels that read piece.weights and piece.slice_at are launched on the stream here */
        rc = numoe_gpu_piece_done(gpu, stream, &piece, error);
        if (rc)
            break;
        ++*pieces;
    }
    numoe_gpu_pieces_end(gpu, stream);
    return rc;
}

int main(int argc, char **argv)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_options options = NUMOE_OPTIONS_INIT;
    struct numoe_model_info info = NUMOE_MODEL_INFO_INIT;
    struct numoe *context = NULL;
    struct numoe_model *model = NULL;
    struct numoe_gpu_model *gpu;
    unsigned pieces = 0;
    int rc = -1;

    if (argc != 2) {
        fprintf(stderr, "usage: %s CHECKPOINT-DIRECTORY\n", argv[0]);
        return 2;
    }
    options.gpu = NUMOE_GPU_ON;
    options.gpu_stream = true;
    if (numoe_open(&options, &context, &error) ||
        numoe_model_load(context, argv[1], NULL, &model, &error))
        goto out;
    numoe_model_info(model, &info);
    gpu = numoe_model_gpu(model);
    rc = gpu ? count_pieces(gpu, &pieces, &error) : 0;
    if (gpu && !rc)
        printf("%s: %u pieces of layer 0\n", info.gpu, pieces);
    else if (!gpu)
        printf("the CPU computes: %s\n", info.gpu_note);
out:
    if (rc)
        fprintf(stderr, "%s: %s\n", error.where, error.message);
    numoe_model_destroy(model);
    numoe_close(context);
    return rc != 0;
}

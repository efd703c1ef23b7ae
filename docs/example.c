/* Load a checkpoint's experts and compute one token of its first MoE layer. */
#include <inttypes.h>
#include <numoe.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    struct numoe_error error = NUMOE_ERROR_INIT;
    struct numoe_model_info info = {.size = sizeof info};
    struct numoe_batch batch = NUMOE_BATCH_INIT;
    struct numoe *context = NULL;
    struct numoe_model *model = NULL;
    float *x = NULL, *y = NULL;
    int rc = -1;

    if (argc != 2) {
        fprintf(stderr, "usage: %s CHECKPOINT-DIRECTORY\n", argv[0]);
        return 2;
    }
    if (numoe_open(NULL, &context, &error) ||
        numoe_model_load(context, argv[1], NULL, &model, &error))
        goto out;
    numoe_model_info(model, &info);
    x = calloc(info.desc.hidden, sizeof *x);
    y = calloc(info.desc.hidden, sizeof *y);
    if (!x || !y)
        goto out;
    for (uint64_t i = 0; i < info.desc.hidden; i++)
        x[i] = (float)(i % 7) - 3;

    /* What the model's router would give: two experts and their weights. */
    const int32_t ids[] = {0, 1};
    const float weights[] = {0.75f, 0.25f};

    batch.tokens = 1;
    batch.top_k = 2;
    batch.x = x;
    batch.x_type = NUMOE_F32;
    batch.ids = ids;
    batch.weights = weights;
    batch.out = y;
    batch.out_type = NUMOE_F32;
    rc = numoe_forward(model, 0, &batch, NULL, &error);
    if (rc == 0)
        printf("y[0] = %g, y[%" PRIu64 "] = %g\n", (double)y[0], info.desc.hidden - 1,
               (double)y[info.desc.hidden - 1]);
out:
    if (rc)
        fprintf(stderr, "%s: %s\n", error.where, error.message);
    free(y);
    free(x);
    numoe_model_destroy(model);
    numoe_close(context);
    return rc ? 1 : 0;
}

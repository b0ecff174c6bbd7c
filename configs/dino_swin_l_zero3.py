# mmdet's DINO with Swin-L on COCO under ZeRO-3. Nothing of the model changes.
_base_ = ['mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py', './_base_/zero3.py']

model_wrapper_cfg = dict(
    wrap_policy=dict(
        type='ModuleClassPolicy',
        classes=[
            'SwinBlock',
            'DeformableDetrTransformerEncoderLayer',
            'DeformableDetrTransformerDecoderLayer',
        ],
    )
)
